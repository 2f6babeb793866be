// XXH64 over bytes that come in pieces.
#pragma once

#include <memory>
#include <string>

#include "ehc/tensor.h"

namespace ehc::cli {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  void add(const Tensor& tensor);  // contiguous, in host memory
  [[nodiscard]] std::string text() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ehc::cli
