#include "cli/case_list.h"

#include <map>
#include <set>

#include "core/file_io.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  while (true) {
    const size_t end = text.find(at);
    parts.emplace_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text = text.substr(end + 1);
  }
}

std::vector<std::string> words_of(std::string_view line) {
  std::vector<std::string> words;
  for (size_t at = 0; (at = line.find_first_not_of(" \t\r", at)) != std::string_view::npos;) {
    const size_t end = line.find_first_of(" \t\r", at);
    words.emplace_back(line.substr(at, end - at));
    if (end == std::string_view::npos) break;
    at = end;
  }
  return words;
}

// "a=1|2 b=3|4" stands for four cases.
std::vector<CaseLine> expand(const CaseLine& line) {
  std::vector<CaseLine> cases = {{line.op, {}, 1}};
  for (const auto& [key, alternatives] : line.settings) {
    std::vector<CaseLine> longer;
    for (const CaseLine& so_far : cases) {
      for (const std::string& value : split(alternatives, '|')) {
        longer.push_back(so_far);
        longer.back().set(key, value);
      }
    }
    cases = std::move(longer);
  }
  return cases;
}

}  // namespace

std::string CaseLine::get(std::string_view key, std::string_view otherwise) const {
  for (const auto& [name, value] : settings) {
    if (name == key) return value;
  }
  return std::string(otherwise);
}

void CaseLine::set(std::string_view key, std::string_view value) {
  for (auto& [name, old] : settings) {
    if (name == key) {
      old = value;
      return;
    }
  }
  settings.emplace_back(key, value);
}

std::string CaseLine::text() const {
  std::string line = op;
  for (const auto& [key, value] : settings) line += " " + key + "=" + value;
  return line;
}

std::vector<CaseLine> parse_cases(std::string_view text, const std::string& source) {
  std::vector<CaseLine> cases;
  std::map<std::string, CaseLine> defaults;
  int number = 0;
  for (const std::string& line : split(text, '\n')) {
    ++number;
    const auto fail_line = [&](const std::string& what) {
      throw Error(ErrorKind::contract, source + ":" + std::to_string(number) + ": " + what);
    };
    std::vector<std::string> words = words_of(std::string_view(line).substr(0, line.find('#')));
    if (words.empty()) continue;
    const bool is_default = words.front() == "defaults";
    if (is_default) words.erase(words.begin());
    if (words.empty() || words.front().find('=') != std::string::npos) {
      fail_line("expected an operator's name, got '" + (words.empty() ? line : words.front()) +
                "'");
    }
    CaseLine parsed{words.front(), {}, 1};
    const auto known = defaults.find(parsed.op);
    if (known != defaults.end()) parsed.settings = known->second.settings;
    std::set<std::string> keys;  // of this line
    for (size_t i = 1; i < words.size(); ++i) {
      const size_t equals = words[i].find('=');
      if (equals == std::string::npos || equals == 0 || equals + 1 == words[i].size()) {
        fail_line("expected key=value, got '" + words[i] + "'");
      }
      const std::string key = words[i].substr(0, equals);
      if (!keys.insert(key).second) fail_line("expected every key once, got '" + key + "' twice");
      parsed.set(key, words[i].substr(equals + 1));
    }
    if (is_default) {
      defaults[parsed.op] = parsed;
      continue;
    }
    for (CaseLine& one : expand(parsed)) {
      const std::string level = one.get("level", "1");
      if (level != "1" && level != "2" && level != "3") {
        fail_line("level: expected 1, 2 or 3, got '" + level + "'");
      }
      one.level = level[0] - '0';
      cases.push_back(std::move(one));
    }
  }
  return cases;
}

std::vector<CaseLine> read_case_file(const std::string& path) {
  constexpr uint64_t kMostBytes = uint64_t{1} << 26;
  return parse_cases(read_file(path, kMostBytes), path);
}

std::vector<CaseLine> load_cases(std::span<const CaseText> texts, const std::string& path) {
  if (!path.empty()) return read_case_file(path);
  std::vector<CaseLine> all;
  for (const CaseText& text : texts) {
    for (CaseLine& line : parse_cases(text.text, std::string(text.name))) {
      all.push_back(std::move(line));
    }
  }
  return all;
}

}  // namespace ehc::cli
