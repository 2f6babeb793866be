// One line on a terminal for work that takes over a second; silent elsewhere.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace ehc::cli {

class Progress {
 public:
  Progress(std::string what, size_t total);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `label` says what is being worked on.
  void show(size_t done, const std::string& label);
  // Removes the line, before something else is printed.
  void clear();

 private:
  std::string what_;
  size_t total_;
  bool is_terminal_;
  bool is_shown_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace ehc::cli
