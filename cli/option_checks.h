// Checks of option values that the command line library lacks.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

namespace ehc::cli {

// CLI::Range accepts NaN.
inline std::function<std::string(const std::string&)> number_between(double least, double most) {
  return [least, most](const std::string& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return {};
    return fmt::format("expected a number from {:g} to {:g}, got '{}'", least, most, text);
  };
}

}  // namespace ehc::cli
