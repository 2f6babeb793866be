// What `ehc check` and `ehc bench` are asked for: operators and cases by name.
#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/case_list.h"
#include "core/operator.h"

namespace ehc::cli {

// The named operators, or all of them. Throws UsageError for an unknown name.
std::vector<const Operator*> select_operators(const std::vector<std::string>& names);

// The keys and values of an option that may be given several times. Throws UsageError.
std::vector<std::pair<std::string, std::string>> split_settings(
    const std::string& option, const std::vector<std::string>& texts);

// The cases of `path`, or of the texts when it is empty. Throws UsageError when a file of the
// user's names an operator that this build does not have.
std::vector<CaseLine> select_cases(std::span<const CaseText> texts, const std::string& path);

}  // namespace ehc::cli
