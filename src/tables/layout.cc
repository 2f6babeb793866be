// HashLayout: derivation and presets. Reading, writing and checking stand in layout_file.cc and
// layout_check.cc.
#include <algorithm>
#include <limits>
#include <set>

#include "ehc/error.h"
#include "ehc/table.h"
#include "tables/hash_layout.h"

namespace ehc::tables {
namespace {

constexpr int64_t kLargestI32 = std::numeric_limits<int32_t>::max();

void check_range(const char* name, int64_t value, int64_t least) {
  if (value >= least && value <= kLargestI32) return;
  throw Error(ErrorKind::contract, std::string("attribute '") + name + "': expected " +
                                       std::to_string(least) + "..2147483647, got " +
                                       std::to_string(value));
}

std::vector<int64_t> multipliers_of(const HashLayoutConfig& config) {
  std::vector<int64_t> ids = config.layer_ids;
  // SplitMix64 streams belong to positions in the list, not to the layers' numbers.
  if (config.scheme == MultiplierScheme::splitmix64) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  }
  return hash_multipliers(ids, config.max_ngram(), config.compressed_vocab, config.seed,
                          config.scheme);
}

}  // namespace

std::string_view name_of(MultiplierScheme scheme) {
  return scheme == MultiplierScheme::numpy ? "numpy" : "splitmix64";
}

std::string_view name_of(WindowBlocking blocking) {
  return blocking == WindowBlocking::slot ? "slot" : "farther";
}

HashLayoutConfig HashLayoutConfig::demo(int64_t compressed_vocab) {
  return {.layer_ids = {1, 15},
          .sizes = {646400, 646400},
          .heads = 8,
          .row_width = 512 / 8,
          .compressed_vocab = compressed_vocab,
          .seed = 0,
          .scheme = MultiplierScheme::numpy,
          .blocking = WindowBlocking::slot,
          .pad_id = 2,
          .reset_id = -1};
}

HashLayoutConfig HashLayoutConfig::deepseek_v4_1() {
  return {.layer_ids = {1, 14},
          .sizes = {16000000, 16000000, 16000000},
          .heads = 8,
          .row_width = 256,
          .compressed_vocab = 99092,
          .seed = 0,
          .scheme = MultiplierScheme::numpy,
          .blocking = WindowBlocking::farther,
          .pad_id = 2,
          .reset_id = -1};
}

HashLayoutConfig HashLayoutConfig::qwen3_8() {
  constexpr int64_t kEndOfText = 248044;
  return {.layer_ids = {2},
          .sizes = {20000000, 20000000},
          .heads = 8,
          .row_width = 160,
          .compressed_vocab = 248320,
          .seed = 0,
          .scheme = MultiplierScheme::splitmix64,
          .blocking = WindowBlocking::slot,
          .pad_id = kEndOfText,
          .reset_id = kEndOfText};
}

HashLayout HashLayout::make(const HashLayoutConfig& config, DType index_dtype) {
  check_range("heads", config.heads, 1);
  check_range("row_width", config.row_width, 1);
  check_range("pad_id", config.pad_id, 0);
  check_range("reset_id", config.reset_id, -1);
  std::set<int64_t> seen;
  for (const int64_t id : config.layer_ids) {
    if (seen.insert(id).second) continue;
    throw Error(ErrorKind::contract, "attribute 'layer_ids': expected distinct layers, got " +
                                         std::to_string(id) + " twice");
  }
  HashLayout layout;
  layout.config_ = config;
  layout.multipliers_ = multipliers_of(config);
  layout.vocab_sizes_ = hash_primes(config.sizes, config.layers(), config.heads);
  layout.offsets_ = hash_offsets(layout.vocab_sizes_, config.layers(), index_dtype);
  layout.rows_ = row_counts(layout.vocab_sizes_, config.layers());
  return layout;
}

DType HashLayout::index_dtype() const {
  const auto fits = [](int64_t rows) { return rows <= kLargestI32; };
  return std::all_of(rows_.begin(), rows_.end(), fits) ? DType::i32 : DType::i64;
}

Tensor HashLayout::multipliers_tensor() const {
  return {multipliers_.data(), DType::i64, {config_.layers(), config_.max_ngram()}};
}

Tensor HashLayout::vocab_sizes_tensor() const {
  return {
      vocab_sizes_.data(), DType::i32, {config_.layers(), config_.max_ngram() - 1, config_.heads}};
}

Tensor HashLayout::offsets_tensor() const {
  return {offsets_.data(), DType::i64, {config_.layers(), config_.columns()}};
}

}  // namespace ehc::tables
