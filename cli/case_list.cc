#include "cli/case_list.h"

#include <cstdlib>
#include <map>
#include <set>

#include "cli/pairwise.h"
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

// The product of the plain integers among the values of `keys`; others count 1.
double product_of(const CaseLine& line, const std::vector<std::string>& keys) {
  double product = 1;
  for (const std::string& key : keys) {
    const std::string value = line.get(key);
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (!value.empty() && *end == 0) product *= number;
  }
  return product;
}

// "pairwise" before a line: every pair of alternatives of two keys in some case. With
// `most=T*d:1000` the product of two keys is at most so large.
std::vector<CaseLine> expand_pairwise(const CaseLine& line) {
  std::vector<std::vector<std::string>> values;
  std::vector<int> counts;
  for (const auto& [key, alternatives] : line.settings) {
    values.push_back(split(alternatives, '|'));
    counts.push_back(static_cast<int>(values.back().size()));
  }
  const std::string limit = line.get("most");
  const size_t colon = limit.find(':');
  const std::vector<std::string> keys = split(limit.substr(0, colon), '*');
  const double most =
      colon == std::string::npos ? 0 : std::strtod(limit.c_str() + colon + 1, nullptr);
  const auto one = [&](const std::vector<std::pair<size_t, int>>& positions) {
    CaseLine chosen{line.op, {}, 1};
    for (const auto& [k, i] : positions) {
      if (line.settings[k].first == "most") continue;
      chosen.set(line.settings[k].first, values[k][static_cast<size_t>(i)]);
    }
    return chosen;
  };
  const auto refuses = [&](int k, int i, int l, int j) {
    return most > 0 &&
           product_of(one({{static_cast<size_t>(k), i}, {static_cast<size_t>(l), j}}), keys) > most;
  };
  std::vector<CaseLine> cases;
  for (const std::vector<int>& combination : pairwise(counts, refuses)) {
    std::vector<std::pair<size_t, int>> positions;
    for (size_t k = 0; k < combination.size(); ++k) positions.emplace_back(k, combination[k]);
    cases.push_back(one(positions));
  }
  return cases;
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
  for (const auto& [key, value] : settings) {
    if (!value.empty()) line += " " + key + "=" + value;
  }
  return line;
}

std::vector<CaseLine> parse_cases(std::string_view text, const std::string& source) {
  std::vector<CaseLine> cases;
  std::map<std::string, CaseLine> defaults;
  std::map<std::string, std::string> lists;  // "@name" stands for these alternatives
  int number = 0;
  for (const std::string& line : split(text, '\n')) {
    ++number;
    const auto fail_line = [&](const std::string& what) {
      throw Error(ErrorKind::contract, source + ":" + std::to_string(number) + ": " + what);
    };
    std::vector<std::string> words = words_of(std::string_view(line).substr(0, line.find('#')));
    if (words.empty()) continue;
    if (words.front() == "list") {
      const size_t equals = words.size() == 2 ? words[1].find('=') : std::string::npos;
      if (equals == std::string::npos) fail_line("expected list name=alternatives");
      lists[words[1].substr(0, equals)] = words[1].substr(equals + 1);
      continue;
    }
    const bool is_default = words.front() == "defaults";
    const bool is_pairwise = words.front() == "pairwise";
    if (is_default || is_pairwise) words.erase(words.begin());
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
      std::string value = words[i].substr(equals + 1);
      if (value[0] == '@') {
        const auto list = lists.find(value.substr(1));
        if (list == lists.end()) fail_line("expected a list of this file, got '" + value + "'");
        value = list->second;
      }
      parsed.set(key, value);
    }
    if (is_default) {
      defaults[parsed.op] = parsed;
      continue;
    }
    for (CaseLine& one : is_pairwise ? expand_pairwise(parsed) : expand(parsed)) {
      const std::string level = one.get("level", "1");
      if (level != "1" && level != "2" && level != "3") {
        fail_line("level: expected 1, 2 or 3, got '" + level + "'");
      }
      one.level = level[0] - '0';
      const std::string device = one.get("device", "any");
      if (device != "any" && device != "cpu" && device != "cuda") {
        fail_line("device: expected cpu, cuda or any, got '" + device + "'");
      }
      one.device = device;
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
