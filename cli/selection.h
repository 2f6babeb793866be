// What `ehc check` and `ehc bench` are asked for: operators, implementations and cases by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/case_list.h"
#include "core/operator.h"

namespace ehc::cli {

// Whether `wanted` names the implementation or its family ("cpu" all "cpu.*"), or is empty.
bool names_implementation(std::string_view wanted, std::string_view name);

// The named operators, or all of them. Throws UsageError for an unknown name.
std::vector<const Operator*> select_operators(const std::vector<std::string>& names);

// The cases of `path`, or of the texts when it is empty. Throws UsageError when a file of the
// user's names an operator that this build does not have.
std::vector<CaseLine> select_cases(std::span<const CaseText> texts, const std::string& path);

}  // namespace ehc::cli
