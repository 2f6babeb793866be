#include "cli/text_inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "cli/integers.h"
#include "ehc/error.h"

namespace ehc::cli {

Tensor usable_ids(const tables::NpyArray& file, const std::string& path, int64_t limit) {
  const Tensor& ids = file.tensor;
  if (ids.rank != 1 || (ids.dtype != DType::i32 && ids.dtype != DType::i64)) {
    throw Error(ErrorKind::contract,
                fmt::format("{}: expected I32 or I64[T], got {} with {} dimensions", path,
                            name_of(ids.dtype), ids.rank));
  }
  if (ids.shape[0] == 0) {
    throw Error(ErrorKind::contract, path + ": expected at least one token, got none");
  }
  const int64_t tokens = limit > 0 ? std::min(limit, ids.shape[0]) : ids.shape[0];
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t id = integer_at(ids, t);
    if (id < 0) {
      throw Error(ErrorKind::contract,
                  fmt::format("{}: expected ids >= 0, got {} at position {}", path, id, t));
    }
  }
  return ids.slice(0, 0, tokens);
}

size_t find_layer(const tables::HashLayout& layout, const std::string& path, int64_t layer_id) {
  const std::vector<int64_t>& ids = layout.config().layer_ids;
  if (layer_id < 0) return 0;
  const auto at = std::find(ids.begin(), ids.end(), layer_id);
  if (at == ids.end()) {
    throw Error(ErrorKind::contract,
                fmt::format("--layer: expected one of {} (layers of {}), got {}",
                            fmt::join(ids, " "), path, layer_id));
  }
  return static_cast<size_t>(at - ids.begin());
}

void require_fitting(const text::TokenMap& map, const std::string& map_path,
                     const tables::HashLayout& layout, const std::string& layout_path) {
  const tables::HashLayoutConfig& config = layout.config();
  if (config.compressed_vocab != map.size()) {
    throw Error(ErrorKind::contract,
                fmt::format("{}: expected a layout of {} ids as in {}, got {}", layout_path,
                            map.size(), map_path, config.compressed_vocab));
  }
  for (const int64_t id : {config.pad_id, config.reset_id}) {
    if (id >= map.vocab_size()) {
      throw Error(ErrorKind::contract, fmt::format("{}: expected pad and reset ids < {}, got {}",
                                                   layout_path, map.vocab_size(), id));
    }
  }
}

int64_t mapped_id(const text::TokenMap& map, int64_t id) {
  return id < 0 ? int64_t{-1} : int64_t{map.table()[static_cast<size_t>(id)]};
}

}  // namespace ehc::cli
