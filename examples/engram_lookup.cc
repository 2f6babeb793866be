// The Engram lookup: which table rows a few tokens address, for a small table and for a large one.
//
// The number of rows per token depends on the n-gram orders and heads alone, and the rows on the
// token ids alone, so they are known before the model runs.
#include <ehc/engram/hash.h>
#include <ehc/engram/layout.h>
#include <ehc/engram/window.h>

#include <cstdint>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int64_t kTokens = 6;
constexpr int64_t kMaxNgram = 3;
constexpr int64_t kHeads = 8;
constexpr int64_t kColumns = (kMaxNgram - 1) * kHeads;  // rows per token and layer
constexpr int64_t kLayerIds[] = {1, 15};
constexpr int64_t kLayers = 2;
constexpr int64_t kVocabulary = 129280;

using ehc::DType;
using ehc::Tensor;

void print_shape(const char* name, const Tensor& t) {
  std::string dims;
  for (int k = 0; k < t.rank; ++k) dims += (k == 0 ? "" : ", ") + std::to_string(t.shape[k]);
  std::printf("%s (%s) %s\n", name, dims.c_str(), t.dtype == DType::i64 ? "int64" : "int32");
}

// Distinct rows of one layer that token t reads.
size_t rows_of_token(const std::vector<int32_t>& indices, int64_t layer, int64_t t) {
  const auto first = indices.begin() + (layer * kTokens + t) * kColumns;
  return std::set<int32_t>(first, first + kColumns).size();
}

}  // namespace

int main() {
  ehc::Context context = ehc::Context::cpu();

  const int32_t ids[kTokens] = {1820, 4248, 310, 279, 4248, 310};
  std::vector<int32_t> window(kTokens * kMaxNgram);
  const Tensor ngrams(window.data(), DType::i32, {kTokens, kMaxNgram});
  ehc::engram::window(context, {.ids = {ids, DType::i32, {kTokens}},
                                .max_ngram = kMaxNgram,
                                .pad_id = 2,
                                .blocking = ehc::engram::Blocking::slot,
                                .window = ngrams});

  std::vector<int64_t> multipliers(kLayers * kMaxNgram);
  const Tensor factors(multipliers.data(), DType::i64, {kLayers, kMaxNgram});
  ehc::engram::multipliers(context, {.layer_ids = kLayerIds,
                                     .max_ngram = kMaxNgram,
                                     .compressed_vocab = kVocabulary,
                                     .multipliers = factors});

  for (const int64_t slots : {int64_t{258'000}, int64_t{10'000'000}}) {
    // Every head of every order has a part of the table, of prime size.
    const int64_t sizes[kMaxNgram - 1] = {slots / kColumns, slots / kColumns};
    std::vector<int32_t> vocab_sizes(kLayers * kColumns);
    const Tensor primes(vocab_sizes.data(), DType::i32, {kLayers, kMaxNgram - 1, kHeads});
    ehc::engram::primes(
        context, {.sizes = sizes, .layers = kLayers, .heads = kHeads, .vocab_sizes = primes});
    std::vector<int32_t> starts(kLayers * kColumns);
    const Tensor offsets(starts.data(), DType::i32, {kLayers, kColumns});
    ehc::engram::offsets(context, {.vocab_sizes = primes, .offsets = offsets});

    std::vector<int32_t> rows[2];
    for (std::vector<int32_t>& run : rows) {
      run.resize(kLayers * kTokens * kColumns);
      ehc::engram::hash(context,
                        {.window = ngrams,
                         .multipliers = factors,
                         .vocab_sizes = primes,
                         .offsets = offsets,
                         .indices = {run.data(), DType::i32, {kLayers, kTokens, kColumns}}});
    }

    std::printf("table of %lld slots\n", static_cast<long long>(slots));
    print_shape("  ngram_token_ids", ngrams);
    print_shape("  multipliers", factors);
    print_shape("  vocab_sizes", primes);
    print_shape("  offsets", offsets);
    print_shape("  indices", {rows[0].data(), DType::i32, {kLayers, kTokens, kColumns}});
    std::set<size_t> counts;
    for (int64_t l = 0; l < kLayers; ++l) {
      for (int64_t t = 0; t < kTokens; ++t) counts.insert(rows_of_token(rows[0], l, t));
    }
    std::printf("  rows gathered per token: %zu to %zu\n", *counts.begin(), *counts.rbegin());
    std::printf("  second run identical: %s\n", rows[0] == rows[1] ? "yes" : "no");
  }
}
