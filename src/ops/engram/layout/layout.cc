#include "ehc/engram/layout.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "core/registry.h"
#include "tables/hash_layout.h"

namespace ehc::engram {

std::vector<int32_t> primes_reference(std::span<const int64_t> sizes, int64_t layers,
                                      int64_t heads);

namespace {

constexpr auto kMultipliersTable =
    table("engram.multipliers", "1.3", "odd multipliers of the n-gram hash",
          attribute<&Multipliers::layer_ids>("layer_ids").at_least(0).fixes("L"),
          attribute<&Multipliers::max_ngram>("max_ngram").between(2, 8).fixes("Nmax"),
          attribute<&Multipliers::compressed_vocab>("compressed_vocab").at_least(1),
          attribute<&Multipliers::seed>("seed").at_least(0),
          attribute<&Multipliers::scheme>("scheme", "numpy/splitmix64"),
          out<&Multipliers::multipliers>("multipliers", "I64[L,Nmax]").packed());

constexpr auto kPrimesTable =
    table("engram.primes", "1.3", "distinct prime table sizes",
          attribute<&Primes::sizes>("sizes").at_least(1).fixes("Nmax-1"),
          attribute<&Primes::layers>("layers").at_least(1).fixes("L"),
          attribute<&Primes::heads>("heads").at_least(1).fixes("Kh"),
          out<&Primes::vocab_sizes>("vocab_sizes", "I32[L,Nmax-1,Kh]").packed());

constexpr auto kOffsetsTable =
    table("engram.offsets", "1.4", "where the rows of each column begin",
          in<&Offsets::vocab_sizes>("vocab_sizes", "I32[L,Nmax-1,Kh]").packed(),
          call_choice("index_dtype", "I32/I64", "I32"),
          out<&Offsets::offsets>("offsets", "X:I32/I64[L,C]").dtype_from("index_dtype").packed());

void run_multipliers(const Call& call) {
  const auto& p = *static_cast<const Multipliers*>(call.params);
  if (p.layer_ids.empty()) return;
  const std::vector<int64_t> made =
      tables::hash_multipliers(p.layer_ids, *p.max_ngram, *p.compressed_vocab, p.seed, p.scheme);
  std::copy(made.begin(), made.end(), p.multipliers.as<int64_t>());
}

// Errors of tables:: name no operator.
template <class Body>
auto as_primes(const Body& body) {
  try {
    return body();
  } catch (const Error& e) {
    throw Error(e.kind(), "engram.primes: " + std::string(e.what()));
  }
}

// Before an output of that size is asked for: there are only so many primes below 2^31.
void check_prime_count(Bound& b, const void*) {
  as_primes([&] { return tables::checked_prime_count(b["L"], b["Nmax"] - 1, b["Kh"]); });
}

template <auto Search>
void run_primes(const Call& call) {
  const auto& p = *static_cast<const Primes*>(call.params);
  const std::vector<int32_t> made = as_primes([&] { return Search(p.sizes, *p.layers, *p.heads); });
  if (made.empty()) {
    fail_attribute(kPrimesTable.view(), "sizes", "enough primes up to 2^31-1", "too few");
  }
  std::copy(made.begin(), made.end(), p.vocab_sizes.as<int32_t>());
}

void check_sizes(const Schema& schema, const Bound& b, const void* params) {
  const auto& p = *static_cast<const Offsets*>(params);
  if (p.vocab_sizes.device != Device::cpu) return;
  const auto* sizes = p.vocab_sizes.as<const int32_t>();
  for (int64_t l = 0; l < b["L"]; ++l) {
    int64_t sum = 0;
    for (int64_t c = 0; c < b["C"]; ++c, ++sizes) {
      if (*sizes <= 0) fail_tensor(schema, "vocab_sizes", "sizes > 0", std::to_string(*sizes));
      sum += *sizes;
    }
    if (p.offsets.dtype == DType::i32 && sum > std::numeric_limits<int32_t>::max()) {
      fail_tensor(schema, "vocab_sizes",
                  "sizes of a layer that add up to at most 2147483647 (see index_dtype)",
                  std::to_string(sum) + " in layer " + std::to_string(l));
    }
  }
}

void run_offsets(const Call& call) {
  const auto& p = *static_cast<const Offsets*>(call.params);
  const int64_t layers = call.bound["L"];
  if (layers == 0) return;
  const std::vector<int64_t> made = tables::hash_offsets(
      {p.vocab_sizes.as<int32_t>(), static_cast<size_t>(layers * call.bound["C"])}, layers,
      p.offsets.dtype);
  if (p.offsets.dtype == DType::i64) {
    std::copy(made.begin(), made.end(), p.offsets.as<int64_t>());
  } else {
    std::transform(made.begin(), made.end(), p.offsets.as<int32_t>(),
                   [](int64_t offset) { return static_cast<int32_t>(offset); });
  }
}

constexpr Implementation kMultipliersList[] = {
    {"reference", Device::cpu, nullptr, &run_multipliers, nullptr},
};
constexpr Implementation kPrimesList[] = {
    {"cpu", Device::cpu, nullptr, &run_primes<&tables::hash_primes>, nullptr},
    {"reference", Device::cpu, nullptr, &run_primes<&primes_reference>, nullptr},
};
constexpr Implementation kOffsetsList[] = {
    {"reference", Device::cpu, nullptr, &run_offsets, nullptr},
};

constexpr Operator kMultipliers = make_operator<Multipliers>(kMultipliersTable, kMultipliersList);
constexpr Operator kPrimes = [] {
  Operator op = make_operator<Primes>(kPrimesTable, kPrimesList);
  op.derive = &check_prime_count;
  return op;
}();
constexpr Operator kOffsets = [] {
  Operator op = make_operator<Offsets>(kOffsetsTable, kOffsetsList);
  op.rules = &check_sizes;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(multipliers, Multipliers, kMultipliers);
EHC_DEFINE_CALLS(primes, Primes, kPrimes);
EHC_DEFINE_CALLS(offsets, Offsets, kOffsets);
EHC_REGISTER(layout, &kMultipliers, &kPrimes, &kOffsets);

}  // namespace ehc::engram
