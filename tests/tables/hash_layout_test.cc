#include "tables/hash_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "ehc/error.h"
#include "tables/primes.h"
#include "tables/safetensors.h"
#include "tests/tables/table_test_support.h"

namespace ehc::tables {
namespace {

using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::HasSubstr;

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

template <class Body>
std::string contract_error(const Body& body) {
  return error_text(ErrorKind::contract, body);
}

std::vector<int64_t> numpy_multipliers(std::vector<int64_t> layer_ids, int64_t max_ngram,
                                       int64_t compressed_vocab, int64_t seed = 0) {
  return hash_multipliers(layer_ids, max_ngram, compressed_vocab, seed, MultiplierScheme::numpy);
}

TEST(Multipliers, GeneratorVectorsOfTheDemo) {
  EXPECT_EQ(half_range(129280), 35672076256399);
  EXPECT_THAT(numpy_multipliers({1, 15}, 3, 129280),
              ElementsAre(58737837727525, 3709723095905, 27562777300965, 22166238923025,
                          42939128327945, 41336139856257));
}

TEST(Multipliers, DeepseekV41) {
  EXPECT_EQ(half_range(99092), 46539438283891);
  EXPECT_THAT(numpy_multipliers({1, 14}, 4, 99092),
              ElementsAre(76632096046245, 4839876093313, 35959672319349, 73987337458391,
                          67716810739261, 51510806800915, 30921347202721, 82619226485591));
}

TEST(Multipliers, SeedAddsToTheLayer) {
  EXPECT_EQ(numpy_multipliers({3}, 4, 1000, 10007 * 4), numpy_multipliers({7}, 4, 1000, 0));
}

TEST(Multipliers, ExtremesStayWithinTheBound) {
  for (const int64_t vocab : {int64_t{1}, int64_t{2}, int64_t{3}, kLargest / 2, kLargest / 2 + 1,
                              kLargest - 1, kLargest}) {
    for (const auto scheme : {MultiplierScheme::numpy, MultiplierScheme::splitmix64}) {
      for (const int64_t multiplier :
           hash_multipliers(std::vector<int64_t>{0, kLargest}, 8, vocab, kLargest, scheme)) {
        EXPECT_EQ(multiplier % 2, 1);
        int64_t product = 0;
        EXPECT_FALSE(__builtin_mul_overflow(vocab - 1, multiplier, &product)) << vocab;
      }
    }
  }
}

// numpy.random.default_rng(2**63 - 1 + 10007 * (2**63 - 1)).integers(0, 46539438283891, 2) * 2 + 1
TEST(Multipliers, SeedBeyond64Bits) {
  EXPECT_THAT(numpy_multipliers({kLargest}, 2, 99092, kLargest),
              ElementsAre(78104149868877, 10935170611109));
}

TEST(Multipliers, RefusesWhatTheContractExcludes) {
  EXPECT_EQ(contract_error([] { (void)numpy_multipliers({}, 3, 10); }),
            "attribute 'layer_ids': expected at least one value, got none");
  EXPECT_EQ(contract_error([] {
              (void)numpy_multipliers({1, -2}, 3, 10);
            }),
            "attribute 'layer_ids': expected >= 0, got -2");
  EXPECT_EQ(contract_error([] { (void)numpy_multipliers({1}, 1, 10); }),
            "attribute 'max_ngram': expected 2..8, got 1");
  EXPECT_EQ(contract_error([] { (void)numpy_multipliers({1}, 9, 10); }),
            "attribute 'max_ngram': expected 2..8, got 9");
  EXPECT_EQ(contract_error([] { (void)numpy_multipliers({1}, 3, 0); }),
            "attribute 'compressed_vocab': expected >= 1, got 0");
  EXPECT_EQ(contract_error([] { (void)numpy_multipliers({1}, 3, 10, -1); }),
            "attribute 'seed': expected >= 0, got -1");
}

TEST(Primes, Demo) {
  EXPECT_THAT(hash_primes(std::vector<int64_t>{646400, 646400}, 2, 8),
              ElementsAre(646403, 646411, 646421, 646423, 646433, 646453, 646519, 646523,  //
                          646537, 646543, 646549, 646571, 646573, 646577, 646609, 646619,  //
                          646631, 646637, 646643, 646669, 646687, 646721, 646757, 646771,  //
                          646781, 646823, 646831, 646837, 646843, 646859, 646873, 646879));
}

TEST(Primes, DeepseekV41) {
  const std::vector<int32_t> sizes =
      hash_primes(std::vector<int64_t>{16000000, 16000000, 16000000}, 2, 8);
  ASSERT_EQ(sizes.size(), 48u);
  const int32_t ends[][2] = {{16000057, 16000183}, {16000189, 16000321}, {16000339, 16000463},
                             {16000477, 16000627}, {16000667, 16000769}, {16000781, 16000889}};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(sizes[8 * i], ends[i][0]);
    EXPECT_EQ(sizes[8 * i + 7], ends[i][1]);
  }
  EXPECT_THAT(row_counts(sizes, 2), ElementsAre(384006168, 384016682));
}

// Head size = the n-th prime after base - 1, n = layer * 16 + column + 1.
TEST(Primes, QwenConventionIsTheNthPrime) {
  constexpr int64_t kBase = 20000000;
  const std::vector<int32_t> sizes = hash_primes(std::vector<int64_t>{kBase, kBase}, 3, 8);
  int64_t candidate = kBase - 1;
  for (const int32_t size : sizes) {
    do {
      ++candidate;
    } while (!is_prime(static_cast<uint64_t>(candidate)));
    EXPECT_EQ(size, candidate);
  }
}

TEST(Primes, SizeItselfIsTheFirstCandidate) {
  EXPECT_THAT(hash_primes(std::vector<int64_t>{7}, 1, 2), ElementsAre(7, 11));
  EXPECT_THAT(hash_primes(std::vector<int64_t>{1}, 1, 3), ElementsAre(2, 3, 5));
  EXPECT_THAT(hash_primes(std::vector<int64_t>{2147483647}, 1, 1), ElementsAre(2147483647));
}

TEST(Primes, RefusesWhatTheContractExcludes) {
  const auto primes = [](std::vector<int64_t> sizes, int64_t layers, int64_t heads) {
    return contract_error([&] { (void)hash_primes(sizes, layers, heads); });
  };
  EXPECT_EQ(primes({}, 1, 1), "attribute 'sizes': expected at least one value, got none");
  EXPECT_EQ(primes({5, 0}, 1, 1), "attribute 'sizes': expected >= 1, got 0");
  EXPECT_EQ(primes({5}, 0, 1), "attribute 'layers': expected >= 1, got 0");
  EXPECT_EQ(primes({5}, 1, 0), "attribute 'heads': expected >= 1, got 0");
  EXPECT_EQ(primes({2147483647}, 2, 1),
            "attribute 'sizes': expected a free prime up to 2^31-1 from 2147483647 on for layer 1, "
            "order 2, head 0, got none");
  EXPECT_THAT(primes({kLargest}, 1, 1), HasSubstr("expected a free prime up to 2^31-1"));
  EXPECT_THAT(primes({2, 2}, kLargest, kLargest), HasSubstr("layers * orders * heads"));
  EXPECT_THAT(primes({2}, 1, kTablePrimeCount + 1), HasSubstr("layers * orders * heads"));
}

TEST(Primes, TestAgreesWithTheSieve) {
  for (const int64_t first : {int64_t{0}, int64_t{16700000}, kLargestTablePrime - 5000}) {
    PrimeCursor cursor(first);
    int64_t next = cursor.next();
    for (int64_t number = first; number < first + 5000; ++number) {
      EXPECT_EQ(is_prime(static_cast<uint64_t>(number)), number == next) << number;
      if (number == next) next = cursor.next();
    }
  }
}

TEST(Primes, TestIsExactUpTo64Bits) {
  EXPECT_TRUE(is_prime(18446744073709551557u));  // largest below 2^64
  EXPECT_FALSE(is_prime(18446744073709551615u));
  EXPECT_FALSE(is_prime(3215031751u));           // strong pseudoprime to bases 2, 3, 5, 7
  EXPECT_FALSE(is_prime(3825123056546413051u));  // and to the bases up to 23
  EXPECT_FALSE(is_prime(4294967291u * 4294967279u));
}

TEST(Offsets, RestartInEveryLayer) {
  const std::vector<int32_t> sizes = {5, 7, 11, 13, 17, 19};
  EXPECT_THAT(hash_offsets(sizes, 2, DType::i32), ElementsAre(0, 5, 12, 0, 13, 30));
  EXPECT_THAT(row_counts(sizes, 2), ElementsAre(23, 49));
}

TEST(Offsets, EmptyIsLegal) {
  EXPECT_TRUE(hash_offsets({}, 0, DType::i32).empty());
  EXPECT_TRUE(hash_offsets({}, 3, DType::i32).empty());
  EXPECT_THAT(row_counts({}, 3), ElementsAre(0, 0, 0));
}

TEST(Offsets, SumDecidesTheIndexType) {
  const std::vector<int32_t> fits = {1, 1, 2147483646, 1};
  EXPECT_THAT(hash_offsets(fits, 2, DType::i32), ElementsAre(0, 1, 0, 2147483646));
  const std::vector<int32_t> too_large = {1, 1, 2147483647, 1};
  EXPECT_EQ(contract_error([&] { (void)hash_offsets(too_large, 2, DType::i32); }),
            "tensor 'vocab_sizes': expected sums <= 2147483647 for I32 offsets, got 2147483648 in "
            "layer 1");
  EXPECT_THAT(hash_offsets(too_large, 2, DType::i64), ElementsAre(0, 1, 0, 2147483647));
  EXPECT_THAT(row_counts(too_large, 2), ElementsAre(2, 2147483648));
}

TEST(Offsets, RefusesWhatTheContractExcludes) {
  const std::vector<int32_t> sizes = {5, 0};
  EXPECT_EQ(contract_error([&] { (void)hash_offsets(sizes, 1, DType::i32); }),
            "tensor 'vocab_sizes': expected sizes >= 1, got 0");
  EXPECT_EQ(contract_error([&] { (void)hash_offsets(sizes, 1, DType::f32); }),
            "attribute 'index_dtype': expected I32 or I64, got F32");
  EXPECT_EQ(contract_error([&] { (void)hash_offsets(sizes, 3, DType::i32); }),
            "tensor 'vocab_sizes': expected a multiple of 3 layers, got 2 sizes");
  EXPECT_EQ(contract_error([&] { (void)row_counts(sizes, 0); }),
            "tensor 'vocab_sizes': expected a multiple of 0 layers, got 2 sizes");
}

// --- golden files, through the safetensors reader ------------------------------------------------

struct Golden {
  SafetensorsFile file;
  nlohmann::json set;
};

Golden read_golden(const std::string& name) {
  SafetensorsFile file =
      SafetensorsFile::open(std::string(EHC_SOURCE_DIR) + "/tests/golden/" + name + ".safetensors");
  auto set = nlohmann::json::parse(file.metadata().at("ehc")).at("set");
  return {std::move(file), std::move(set)};
}

template <class T>
std::vector<int64_t> integers(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.as<T>() + tensor.numel()};
}

std::vector<int64_t> integers(const Tensor& tensor) {
  EXPECT_TRUE(tensor.dtype == DType::i32 || tensor.dtype == DType::i64);
  return tensor.dtype == DType::i32 ? integers<int32_t>(tensor) : integers<int64_t>(tensor);
}

TEST(GoldenLayout, Multipliers) {
  for (int i = 0; i < 3; ++i) {
    const Golden golden = read_golden("engram.multipliers." + std::to_string(i));
    const auto scheme = golden.set.value("scheme", "numpy") == "numpy"
                            ? MultiplierScheme::numpy
                            : MultiplierScheme::splitmix64;
    const auto multipliers = hash_multipliers(
        golden.set.at("layer_ids").get<std::vector<int64_t>>(), golden.set.at("max_ngram"),
        golden.set.at("compressed_vocab"), golden.set.value("seed", int64_t{0}), scheme);
    EXPECT_EQ(multipliers, integers(golden.file.find("expected.multipliers"))) << i;
  }
}

TEST(GoldenLayout, Primes) {
  for (int i = 0; i < 2; ++i) {
    const Golden golden = read_golden("engram.primes." + std::to_string(i));
    const auto sizes = hash_primes(golden.set.at("sizes").get<std::vector<int64_t>>(),
                                   golden.set.at("layers"), golden.set.at("heads"));
    EXPECT_THAT(sizes, ElementsAreArray(integers(golden.file.find("expected.vocab_sizes")))) << i;
  }
}

TEST(GoldenLayout, Offsets) {
  for (int i = 0; i < 5; ++i) {
    const Golden golden = read_golden("engram.offsets." + std::to_string(i));
    const Tensor sizes = golden.file.find("vocab_sizes");
    const Tensor expected = golden.file.find("expected.offsets");
    const auto dtype = dtype_from_name(golden.set.value("index_dtype", "I32"));
    ASSERT_EQ(dtype, expected.dtype);
    const auto offsets = hash_offsets({sizes.as<int32_t>(), static_cast<size_t>(sizes.numel())},
                                      sizes.shape[0], *dtype);
    EXPECT_EQ(offsets, integers(expected)) << i;
  }
}

}  // namespace
}  // namespace ehc::tables
