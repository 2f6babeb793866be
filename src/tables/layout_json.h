// The configuration of a hash layout in JSON: what its file and `ehc layout` have in common.
#pragma once

#include <nlohmann/json.hpp>

#include "ehc/table.h"

namespace ehc::tables {

[[nodiscard]] nlohmann::ordered_json config_json(const HashLayoutConfig& config);

}  // namespace ehc::tables
