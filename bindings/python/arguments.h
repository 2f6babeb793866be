// Arguments of one call: values of Python become those of the C interface.
#pragma once

#include <tvm/ffi/c_api.h>

#include <array>
#include <list>
#include <span>
#include <string>
#include <vector>

#include "ehc/c_api.h"

namespace ehc::python {

// `values` are the operator's tensors by position of its table, then its attributes by position, of
// which the last may be left out.
//   tensor     None (absent), a DLPack tensor, (tensor, "BF16") to read its bits as another type,
//              or ("BF16", dim, ...): type and shape alone, for questions that read no memory
//   list       a sequence of those
//   attribute  None (the default), bool, int, float, str (a choice, or any value as text), or a
//              sequence of int
// Throws Failure for anything else. Refers to `values` and must not outlive them.
class Arguments {
 public:
  Arguments(const ehc_operator* op, std::span<const TVMFFIAny> values);
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  [[nodiscard]] const ehc_arguments* get() const { return &arguments_; }
  // The device of the first tensor, the host when there is none.
  [[nodiscard]] ehc_device device() const { return device_; }

 private:
  void add_tensor(const ehc_tensor_info& info, size_t position, const TVMFFIAny& value);
  void add_list(const ehc_tensor_info& info, const TVMFFIAny& value);
  // Working in place is asked for: the library itself lets the views decide.
  void check_in_place(const ehc_operator* op) const;
  void add_attribute(const ehc_attribute_info& info, size_t position, const TVMFFIAny& value);
  const ehc_tensor* to_tensor(const ehc_tensor_info& info, const TVMFFIAny& value);
  const ehc_tensor* described(const ehc_tensor_info& info, std::span<const TVMFFIAny> parts);
  const ehc_tensor* keep(const ehc_tensor& tensor);
  [[noreturn]] void refuse(const char* kind, const char* name, const std::string& expected,
                           const TVMFFIAny& got) const;

  const ehc_op_info& op_;
  ehc_device device_{EHC_HOST, 0};
  bool has_device_ = false;
  ehc_arguments arguments_{};
  std::vector<const ehc_tensor*> tensors_;
  std::vector<ehc_named_tensor> named_;
  std::vector<ehc_attribute> attributes_;
  // What those point to.
  std::list<ehc_tensor> kept_;
  std::list<std::array<int64_t, EHC_MAX_RANK>> shapes_;
  std::list<std::string> names_;
  std::list<std::vector<int64_t>> integers_;
};

// "BF16"; types that no operator takes have names too, for errors.
[[nodiscard]] std::string type_name(ehc_dtype type);
// The characters of a string.
[[nodiscard]] std::string text(const TVMFFIAny& value);

}  // namespace ehc::python
