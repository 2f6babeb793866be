#include "cli/selection.h"

#include "cli/commands.h"
#include "core/registry.h"

namespace ehc::cli {

std::vector<const Operator*> select_operators(const std::vector<std::string>& names) {
  std::vector<const Operator*> list;
  for (const std::string& name : names) {
    list.push_back(find_operator(name));
    if (list.back() == nullptr)
      throw UsageError("unknown operator '" + name + "'; see ehc op --list");
  }
  if (names.empty()) list.assign(all_operators().begin(), all_operators().end());
  return list;
}

std::vector<std::pair<std::string, std::string>> split_settings(
    const std::string& option, const std::vector<std::string>& texts) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw UsageError(option + ": expected key=value, got '" + text + "'");
    }
    settings.emplace_back(text.substr(0, equals), text.substr(equals + 1));
  }
  return settings;
}

std::vector<CaseLine> select_cases(std::span<const CaseText> texts, const std::string& path) {
  std::vector<CaseLine> lines = load_cases(texts, path);
  for (const CaseLine& line : lines) {
    if (!path.empty() && find_operator(line.op) == nullptr) {
      throw UsageError("case '" + line.text() + "': unknown operator '" + line.op + "'");
    }
  }
  return lines;
}

}  // namespace ehc::cli
