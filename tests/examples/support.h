// What the programs of examples/ print, as text and as numbers.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace ehc::test {

// Standard output of a program of this build, which must succeed.
inline std::string output_of(const std::string& program) {
  const std::string path = EHC_BINARY_DIR "/bin/" + program;
  FILE* pipe = popen(("'" + path + "'").c_str(), "r");
  if (pipe == nullptr) return "cannot run " + path;
  std::string text;
  std::array<char, 4096> block{};
  for (size_t got = 0; (got = fread(block.data(), 1, block.size(), pipe)) > 0;) {
    text.append(block.data(), got);
  }
  EXPECT_EQ(pclose(pipe), 0) << path;
  return text;
}

// The number behind `label`.
inline double number_after(const std::string& text, const std::string& label) {
  const size_t at = text.find(label);
  EXPECT_NE(at, std::string::npos) << label;
  return at == std::string::npos ? NAN : std::stod(text.substr(at + label.size()));
}

// The numbers in brackets behind every `label [`.
inline std::vector<std::vector<double>> lists_after(const std::string& text,
                                                    const std::string& label) {
  std::vector<std::vector<double>> lists;
  for (size_t at = text.find(label + " ["); at != std::string::npos;
       at = text.find(label + " [", at + 1)) {
    const size_t begin = at + label.size() + 2;
    std::istringstream numbers(text.substr(begin, text.find(']', begin) - begin));
    lists.emplace_back(std::istream_iterator<double>(numbers), std::istream_iterator<double>());
  }
  return lists;
}

// Every number within one unit of the last digit; the printed numbers are rounded themselves.
inline void expect_printed(const std::vector<double>& numbers, const std::vector<double>& expected,
                           double unit) {
  EXPECT_THAT(numbers, testing::Pointwise(testing::DoubleNear(1.001 * unit), expected));
}

inline int count(const std::string& text, const std::string& pattern) {
  const std::regex expression(pattern);
  return static_cast<int>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), expression), {}));
}

}  // namespace ehc::test
