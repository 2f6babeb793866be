// What `ehc pipeline` and `ehc train` read: the ids of a text, and the map and the layout for them.
#pragma once

#include <cstdint>
#include <string>

#include "ehc/table.h"
#include "ehc/tensor.h"
#include "ehc/text.h"
#include "tables/npy.h"

namespace ehc::cli {

// The first `limit` ids of the file (0: all). Error{contract} unless they are I32 or I64[T], T > 0,
// none negative.
Tensor usable_ids(const tables::NpyArray& file, const std::string& path, int64_t limit);

// Position of a layer id in the layout's list; a negative id means the first layer.
size_t find_layer(const tables::HashLayout& layout, const std::string& path, int64_t layer_id);

// Error{contract} unless the layout was made for the ids that the map gives.
void require_fitting(const text::TokenMap& map, const std::string& map_path,
                     const tables::HashLayout& layout, const std::string& layout_path);

// A special id of the layout as the window wants it: through the map, -1 for none.
int64_t mapped_id(const text::TokenMap& map, int64_t id);

}  // namespace ehc::cli
