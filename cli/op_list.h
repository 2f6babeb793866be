// The operators of this build as text or JSON, straight from their tables.
#pragma once

namespace ehc::cli {

void print_operator_list(bool as_json);

}  // namespace ehc::cli
