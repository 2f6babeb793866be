// Layout of the n-gram tables: which row a window of token ids addresses.
// Formulas: docs/ops/engram.md, contract 1.3 and 1.4. Host only, exact,
// the same on every machine. Errors: Error{contract} names the attribute, Error{io} the path.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ehc/dtype.h"
#include "ehc/export.h"
#include "ehc/tensor.h"

namespace ehc::tables {

// Where the random part r of a multiplier 2 r + 1 comes from.
enum class MultiplierScheme : uint8_t {
  numpy,       // NumPy's default generator, seeded with seed + 10007 layer_id
  splitmix64,  // SplitMix64 from seed + 10007 (position in the list of layers), mod half
};
EHC_API std::string_view name_of(MultiplierScheme scheme);

// What a blocked position of the window becomes (operator engram.window).
enum class WindowBlocking : uint8_t {
  slot,     // the blocked slot shows the pad id
  farther,  // that slot and every farther one do
};
EHC_API std::string_view name_of(WindowBlocking blocking);

// What a layout is derived from. The orders are n-grams of 2 .. max_ngram ids.
struct HashLayoutConfig {
  std::vector<int64_t> layer_ids;  // [L] the model's layers that own a table, distinct, >= 0
  std::vector<int64_t> sizes;      // [max_ngram - 1] start of the prime search per order, >= 1
  int64_t heads = 8;               // Kh, rows per order
  int64_t row_width = 0;           // hd, values per row
  int64_t compressed_vocab = 0;  // V', number of ids the hash sees; every multiplier depends on it
  int64_t seed = 0;
  MultiplierScheme scheme = MultiplierScheme::numpy;
  WindowBlocking blocking = WindowBlocking::slot;
  int64_t pad_id = 0;     // id before token compression; map it before it enters a window
  int64_t reset_id = -1;  // id behind which the window does not look; -1 for none

  [[nodiscard]] int64_t layers() const { return static_cast<int64_t>(layer_ids.size()); }
  [[nodiscard]] int64_t max_ngram() const { return static_cast<int64_t>(sizes.size()) + 1; }
  // C, rows per token and layer.
  [[nodiscard]] int64_t columns() const { return static_cast<int64_t>(sizes.size()) * heads; }
  bool operator==(const HashLayoutConfig&) const = default;

  // The public demo. Its vocabulary depends on the tokenizer: pass the size of the token map.
  EHC_API static HashLayoutConfig demo(int64_t compressed_vocab);
  EHC_API static HashLayoutConfig deepseek_v4_1();  // DeepSeek-V4.1-Flash
  EHC_API static HashLayoutConfig qwen3_8();        // Qwen3.8-Flash-Next, raw ids
};

// One law that a layout must obey, and the first thing that breaks it.
struct LayoutCheck {
  std::string law;
  bool holds = false;
  std::string fault;  // empty when it holds
};

class EHC_API HashLayout {
 public:
  // Derives everything. Error{contract} for a value out of range, for a search that runs out of
  // primes below 2^31, and, with index_dtype i32, for a layer with more than 2^31 - 1 rows, which
  // it names together with the sum.
  static HashLayout make(const HashLayoutConfig& config, DType index_dtype = DType::i64);

  // A safetensors file: tensors `multipliers`, `vocab_sizes`, `offsets`, `rows` and the
  // configuration as JSON in the metadata. Written atomically.
  void save(const std::string& path) const;

  // Error{io} when the file is not a layout or, with `checked`, when a law of `check` is broken.
  static HashLayout load(const std::string& path, bool checked = true);

  // Holds by construction after `make` and a checked `load`: shapes, odd multipliers, products
  // below 2^63, sizes prime and distinct, offsets, row counts, and everything as derived from the
  // configuration.
  [[nodiscard]] std::vector<LayoutCheck> check() const;

  [[nodiscard]] const HashLayoutConfig& config() const { return config_; }
  [[nodiscard]] const std::vector<int64_t>& multipliers() const {
    return multipliers_;
  }                                                                // [L, Nmax]
  [[nodiscard]] const std::vector<int32_t>& vocab_sizes() const {  // [L, Nmax-1, Kh], primes
    return vocab_sizes_;
  }
  [[nodiscard]] const std::vector<int64_t>& offsets() const { return offsets_; }  // [L, C]
  [[nodiscard]] const std::vector<int64_t>& rows() const { return rows_; }        // [L] table rows
  // I32 when the rows of every layer fit, else I64.
  [[nodiscard]] DType index_dtype() const;

  // Views as the operator engram.hash takes them; they live as long as this object.
  [[nodiscard]] Tensor multipliers_tensor() const;  // I64 [L, Nmax]
  [[nodiscard]] Tensor vocab_sizes_tensor() const;  // I32 [L, Nmax-1, Kh]
  [[nodiscard]] Tensor offsets_tensor() const;      // I64 [L, C]

 private:
  HashLayout() = default;
  HashLayoutConfig config_;
  std::vector<int64_t> multipliers_;
  std::vector<int32_t> vocab_sizes_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> rows_;
};

}  // namespace ehc::tables
