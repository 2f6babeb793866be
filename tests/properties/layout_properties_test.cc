// Properties of layouts and of the safetensors format over random instances.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "ehc/error.h"
#include "tables/hash_layout.h"
#include "tables/primes.h"
#include "tables/safetensors.h"

namespace ehc::tables {
namespace {

struct Search {
  std::vector<int64_t> sizes;
  int64_t layers = 0;
  int64_t heads = 0;
};

Search any_search() {
  // Starts close to each other, so that orders run into each other's primes.
  const int64_t base = *rc::gen::element<int64_t>(1, 40, 5000, 646400, 16000000, 2147000000);
  const auto orders = *rc::gen::inRange<size_t>(1, 8);
  Search search;
  search.sizes = *rc::gen::container<std::vector<int64_t>>(
      orders, rc::gen::inRange<int64_t>(base, base + 200));
  search.layers = *rc::gen::inRange<int64_t>(1, 5);
  search.heads = *rc::gen::inRange<int64_t>(1, 10);
  return search;
}

TEST(LayoutProperties, PrimesAreDistinctAndAscendWithinAnOrder) {
  EXPECT_TRUE(rc::check([] {
    const Search search = any_search();
    const auto sizes = hash_primes(search.sizes, search.layers, search.heads);
    RC_ASSERT(std::set(sizes.begin(), sizes.end()).size() == sizes.size());
    RC_ASSERT(sizes.size() ==
              static_cast<size_t>(search.layers * search.heads) * search.sizes.size());
    const auto heads = static_cast<size_t>(search.heads);
    for (size_t group = 0; group * heads < sizes.size(); ++group) {
      const auto begin = sizes.begin() + static_cast<std::ptrdiff_t>(group * heads);
      RC_ASSERT(std::is_sorted(begin, begin + search.heads));
      RC_ASSERT(*begin >= search.sizes[group % search.sizes.size()]);
    }
    for (const int32_t size : sizes) RC_ASSERT(is_prime(static_cast<uint64_t>(size)));
  }));
}

// The rule of the contract word by word, against the search that continues where it stopped.
TEST(LayoutProperties, SearchEqualsTheRestartingRule) {
  EXPECT_TRUE(rc::check([] {
    const Search search = any_search();
    std::set<int64_t> taken;
    std::vector<int32_t> expected;
    for (int64_t layer = 0; layer < search.layers; ++layer) {
      for (const int64_t size : search.sizes) {
        int64_t candidate = size;
        for (int64_t head = 0; head < search.heads; ++head) {
          while (!is_prime(static_cast<uint64_t>(candidate)) || taken.count(candidate) != 0) {
            ++candidate;
          }
          taken.insert(candidate);
          expected.push_back(static_cast<int32_t>(candidate));
        }
      }
    }
    RC_ASSERT(hash_primes(search.sizes, search.layers, search.heads) == expected);
  }));
}

// A prefix of the layers is laid out the same whatever follows it.
TEST(LayoutProperties, MoreLayersDoNotMoveEarlierOnes) {
  EXPECT_TRUE(rc::check([] {
    const Search search = any_search();
    const auto fewer = hash_primes(search.sizes, search.layers, search.heads);
    const auto more = hash_primes(search.sizes, search.layers + 1, search.heads);
    RC_ASSERT(std::equal(fewer.begin(), fewer.end(), more.begin()));
  }));
}

TEST(LayoutProperties, OffsetsArePrefixSumsAndEndAtTheRows) {
  EXPECT_TRUE(rc::check([] {
    const auto layers = *rc::gen::inRange<size_t>(1, 5);
    const auto columns = *rc::gen::inRange<size_t>(1, 30);
    const auto sizes = *rc::gen::container<std::vector<int32_t>>(
        layers * columns, rc::gen::inRange<int32_t>(1, INT32_MAX));
    const auto offsets = hash_offsets(sizes, static_cast<int64_t>(layers), DType::i64);
    const auto rows = row_counts(sizes, static_cast<int64_t>(layers));
    for (size_t layer = 0; layer < layers; ++layer) {
      const size_t begin = layer * columns;
      RC_ASSERT(offsets[begin] == 0);
      for (size_t i = begin + 1; i < begin + columns; ++i) {
        RC_ASSERT(offsets[i] == offsets[i - 1] + sizes[i - 1]);
      }
      RC_ASSERT(rows[layer] == offsets[begin + columns - 1] + sizes[begin + columns - 1]);
    }
    const bool fits = *std::max_element(rows.begin(), rows.end()) <= INT32_MAX;
    if (fits) {
      RC_ASSERT(hash_offsets(sizes, static_cast<int64_t>(layers), DType::i32) == offsets);
    } else {
      RC_ASSERT_THROWS_AS((void)hash_offsets(sizes, static_cast<int64_t>(layers), DType::i32),
                          Error);
    }
  }));
}

TEST(LayoutProperties, MultipliersAreOddAndKeepProductsBelow2To63) {
  EXPECT_TRUE(rc::check([] {
    const auto vocab =
        *rc::gen::apply([](int64_t value, int shift) { return (value >> shift) + 1; },
                        rc::gen::inRange<int64_t>(0, INT64_MAX), rc::gen::inRange(0, 62));
    const auto seed = *rc::gen::inRange<int64_t>(0, INT64_MAX);
    const std::vector<int64_t> layer_ids = {*rc::gen::inRange<int64_t>(0, INT64_MAX)};
    const auto scheme = *rc::gen::element(MultiplierScheme::numpy, MultiplierScheme::splitmix64);
    for (const int64_t multiplier : hash_multipliers(layer_ids, 8, vocab, seed, scheme)) {
      int64_t product = 0;
      RC_ASSERT(multiplier > 0 && multiplier % 2 == 1);
      RC_ASSERT(!__builtin_mul_overflow(multiplier, vocab - 1, &product));
    }
  }));
}

TEST(LayoutProperties, EveryDerivedLayoutObeysItsLaws) {
  EXPECT_TRUE(rc::check([] {
    const Search search = any_search();
    HashLayoutConfig config;
    config.layer_ids.resize(static_cast<size_t>(search.layers));
    std::iota(config.layer_ids.begin(), config.layer_ids.end(), *rc::gen::inRange(0, 100));
    config.sizes = search.sizes;
    config.heads = search.heads;
    config.row_width = 1;
    config.compressed_vocab = *rc::gen::inRange<int64_t>(1, INT64_MAX);
    config.scheme = *rc::gen::element(MultiplierScheme::numpy, MultiplierScheme::splitmix64);
    for (const LayoutCheck& result : HashLayout::make(config).check()) RC_ASSERT(result.holds);
  }));
}

// --- safetensors ---------------------------------------------------------------------------------

struct OwnedTensor {
  std::vector<uint8_t> bytes;
  DType dtype = DType::none;
  std::vector<int64_t> shape;
};

OwnedTensor any_tensor() {
  OwnedTensor tensor;
  tensor.dtype = static_cast<DType>(*rc::gen::inRange(1, kDTypeCount));
  tensor.shape = *rc::gen::container<std::vector<int64_t>>(*rc::gen::inRange<size_t>(0, 5),
                                                           rc::gen::inRange<int64_t>(0, 5));
  const auto count =
      std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
  const int limit = tensor.dtype == DType::boolean ? 2 : 256;
  tensor.bytes =
      *rc::gen::container<std::vector<uint8_t>>(static_cast<size_t>(count) * size_of(tensor.dtype),
                                                rc::gen::cast<uint8_t>(rc::gen::inRange(0, limit)));
  return tensor;
}

// Names as UTF-8 text, control characters and quotes included.
std::string any_name() {
  std::string name;
  for (const int code : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 0x800))) {
    if (code < 0x80) {
      name += static_cast<char>(code);
    } else {
      name += static_cast<char>(0xc0 | (code >> 6));
      name += static_cast<char>(0x80 | (code & 0x3f));
    }
  }
  return name;
}

TEST(SafetensorsProperties, WriteThenReadIsTheIdentity) {
  EXPECT_TRUE(rc::check([] {
    std::map<std::string, OwnedTensor> owned;
    const int count = *rc::gen::inRange(0, 6);
    for (int i = 0; i < count; ++i) owned[any_name()] = any_tensor();
    Metadata metadata;
    if (*rc::gen::arbitrary<bool>()) metadata[any_name()] = any_name();

    std::vector<NamedTensor> tensors;
    for (const auto& [name, tensor] : owned) {
      tensors.push_back({name, Tensor(tensor.bytes.data(), tensor.dtype, tensor.shape.data(),
                                      static_cast<int>(tensor.shape.size()))});
    }
    const std::string bytes = format_safetensors(tensors, metadata);
    const auto file = SafetensorsFile::parse(bytes, "f");
    RC_ASSERT(file.metadata() == metadata);
    RC_ASSERT(file.tensors().size() == owned.size());
    for (const auto& [name, tensor] : owned) {
      const Tensor read = file.find(name);
      RC_ASSERT(read.dtype == tensor.dtype);
      RC_ASSERT(std::vector<int64_t>(read.shape, read.shape + read.rank) == tensor.shape);
      RC_ASSERT(std::equal(tensor.bytes.begin(), tensor.bytes.end(), read.as<uint8_t>()));
      RC_ASSERT(reinterpret_cast<uintptr_t>(read.data) % kDataAlignment == 0u);
    }
  }));
}

// One changed byte is refused or gives a file that can be written and read again.
TEST(SafetensorsProperties, AnyChangedByteIsRefusedOrConsistent) {
  const float values[6] = {1, 2, 3, 4, 5, 6};
  const uint8_t mask[3] = {0, 1, 1};
  const NamedTensor tensors[] = {{"values", {values, DType::f32, {2, 3}}},
                                 {"mask", {mask, DType::boolean, {3}}}};
  const std::string good = format_safetensors(tensors, {{"key", "value"}});
  for (size_t position = 0; position < good.size(); ++position) {
    for (int byte = 0; byte < 256; ++byte) {
      std::string bytes = good;
      bytes[position] = static_cast<char>(byte);
      try {
        const auto file = SafetensorsFile::parse(bytes, "f");
        std::vector<NamedTensor> again;
        for (const auto& [name, tensor] : file.tensors()) again.push_back({name, tensor});
        const std::string written = format_safetensors(again, file.metadata());
        EXPECT_EQ(SafetensorsFile::parse(written, "f").tensors().size(), file.tensors().size());
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace ehc::tables
