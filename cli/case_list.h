// Cases: lines of text that say with which shapes, dtypes, attributes and data an operator is
// checked and timed. The format is described in docs/cases.md.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ehc::cli {

struct CaseLine {
  std::string op;
  std::vector<std::pair<std::string, std::string>> settings;  // a later one wins
  int level = 1;                                              // least --intensity that runs it
  std::string device = "any";                                 // the only one that runs it

  // The value of `key`, or `otherwise`.
  [[nodiscard]] std::string get(std::string_view key, std::string_view otherwise = {}) const;
  void set(std::string_view key, std::string_view value);
  // The line again, whole: it can be pasted into a file.
  [[nodiscard]] std::string text() const;
};

// Lines of a text, with defaults applied and alternatives written out. Throws Error{contract} that
// names the source and the line.
std::vector<CaseLine> parse_cases(std::string_view text, const std::string& source);
// The same from a file; Error{io} when it cannot be read.
std::vector<CaseLine> read_case_file(const std::string& path);

// A case file that is part of the program.
struct CaseText {
  std::string_view name;
  std::string_view text;
};
std::span<const CaseText> check_case_texts();  // tests/cases/*.txt
std::span<const CaseText> bench_case_texts();  // benches/cases/*.txt

// All cases of the given texts, or of `path` unless it is empty.
std::vector<CaseLine> load_cases(std::span<const CaseText> texts, const std::string& path);

}  // namespace ehc::cli
