#include "arguments.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "failure.h"

namespace ehc::python {

// A DLTensor is passed on as it is.
static_assert(sizeof(ehc_tensor) == sizeof(DLTensor) &&
              offsetof(ehc_tensor, byte_offset) == offsetof(DLTensor, byte_offset));

namespace {

struct NamedType {
  std::string_view name;
  ehc_dtype type;
};

// The first kTaken are those of operators, the rest is named in errors.
constexpr size_t kTaken = 9;
constexpr NamedType kTypes[] = {
    {"F32", {2, 32, 1}},     {"F16", {2, 16, 1}},    {"BF16", {4, 16, 1}}, {"F8_E4M3", {10, 8, 1}},
    {"F8_E8M0", {14, 8, 1}}, {"I64", {0, 64, 1}},    {"I32", {0, 32, 1}},  {"U8", {1, 8, 1}},
    {"BOOL", {6, 8, 1}},     {"F64", {2, 64, 1}},    {"I16", {0, 16, 1}},  {"I8", {0, 8, 1}},
    {"U64", {1, 64, 1}},     {"U32", {1, 32, 1}},    {"U16", {1, 16, 1}},  {"C64", {5, 64, 1}},
    {"C128", {5, 128, 1}},   {"F8_E5M2", {12, 8, 1}}};

bool same(ehc_dtype a, ehc_dtype b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

std::string type_names(const ehc_tensor_info& info) {
  std::string out;
  for (size_t i = 0; i < info.dtype_count; ++i) {
    if (i > 0) out += i + 1 < info.dtype_count ? ", " : " or ";
    out += type_name(info.dtypes[i]);
  }
  return out;
}

std::string text_of(const ehc_tensor& tensor) {
  std::string out = type_name(tensor.dtype) + "[";
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    out += (i > 0 ? "," : "") + std::to_string(tensor.shape[i]);
  }
  return out + "]";
}

bool is_text(const TVMFFIAny& value) {
  return value.type_index == kTVMFFISmallStr || value.type_index == kTVMFFIStr ||
         value.type_index == kTVMFFIRawStr;
}

bool is_sequence(const TVMFFIAny& value) {
  return value.type_index == kTVMFFIArray || value.type_index == kTVMFFIList;
}

std::span<const TVMFFIAny> items(const TVMFFIAny& sequence) {
  const auto* cell = reinterpret_cast<const TVMFFISeqCell*>(
      reinterpret_cast<const char*>(sequence.v_obj) + sizeof(TVMFFIObject));
  return {static_cast<const TVMFFIAny*>(cell->data), static_cast<size_t>(cell->size)};
}

// Null when the value is no tensor.
const ehc_tensor* dlpack(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFITensor) {
    return reinterpret_cast<const ehc_tensor*>(TVMFFITensorGetDLTensorPtr(value.v_obj));
  }
  if (value.type_index == kTVMFFIDLTensorPtr) {
    return static_cast<const ehc_tensor*>(value.v_ptr);
  }
  return nullptr;
}

const char* kind_of(const TVMFFIAny& value) {
  switch (value.type_index) {
    case kTVMFFINone:
      return "None";
    case kTVMFFIBool:
      return value.v_int64 != 0 ? "True" : "False";
    case kTVMFFIInt:
      return "an integer";
    case kTVMFFIFloat:
      return "a float";
    default:
      break;
  }
  if (is_text(value)) return "a string";
  if (is_sequence(value)) return "a sequence";
  return dlpack(value) != nullptr ? "an array" : "an object that is neither array nor number";
}

}  // namespace

std::string type_name(ehc_dtype type) {
  for (const NamedType& known : kTypes) {
    if (same(known.type, type)) return std::string(known.name);
  }
  return "a type of code " + std::to_string(type.code) + " with " + std::to_string(type.bits) +
         " bits ";
}

std::string text(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIRawStr) return value.v_c_str;
  const TVMFFIByteArray bytes = value.type_index == kTVMFFISmallStr
                                    ? TVMFFISmallBytesGetContentByteArray(&value)
                                    : *TVMFFIBytesGetByteArrayPtr(value.v_obj);
  return {bytes.data, bytes.size};
}

Arguments::Arguments(const ehc_operator* op, std::span<const TVMFFIAny> values)
    : op_(*ehc_op_describe(op)) {
  const size_t most = op_.tensor_count + op_.attribute_count;
  if (values.size() < op_.tensor_count || values.size() > most) {
    throw Failure(EHC_CONTRACT, std::string(op_.name) + ": arguments: expected " +
                                    std::to_string(op_.tensor_count) + " to " +
                                    std::to_string(most) + ", got " +
                                    std::to_string(values.size()));
  }
  tensors_.resize(op_.tensor_count);
  for (size_t i = 0; i < op_.tensor_count; ++i) {
    if (values[i].type_index != kTVMFFINone) add_tensor(*ehc_op_tensor(op, i), i, values[i]);
  }
  attributes_.reserve(op_.attribute_count);
  for (size_t i = 0; op_.tensor_count + i < values.size(); ++i) {
    const TVMFFIAny& value = values[op_.tensor_count + i];
    if (value.type_index != kTVMFFINone) add_attribute(*ehc_op_attribute(op, i), i, value);
  }
  check_in_place(op);
  arguments_ = {.tensors = tensors_.data(),
                .tensor_count = tensors_.size(),
                .named_tensors = named_.data(),
                .named_tensor_count = named_.size(),
                .attributes = attributes_.data(),
                .attribute_count = attributes_.size()};
}

void Arguments::check_in_place(const ehc_operator* op) const {
  for (size_t i = 0; i < op_.attribute_count; ++i) {
    if (std::string_view(ehc_op_attribute(op, i)->name) != "inplace") continue;
    const auto given =
        std::ranges::find(attributes_, static_cast<int32_t>(i), &ehc_attribute::position);
    if (given != attributes_.end() && given->integer != 0) return;
    for (size_t t = 0; t < op_.tensor_count; ++t) {
      const ehc_tensor_info& info = *ehc_op_tensor(op, t);
      const ehc_tensor* input =
          info.alias >= 0 ? tensors_[static_cast<size_t>(info.alias)] : nullptr;
      if (tensors_[t] == nullptr || input == nullptr || tensors_[t]->data != input->data ||
          tensors_[t]->data == nullptr || tensors_[t]->byte_offset != input->byte_offset) {
        continue;
      }
      throw Failure(EHC_CONTRACT, std::string(op_.name) + ": tensor '" + info.name +
                                      "': expected memory apart from '" +
                                      ehc_op_tensor(op, static_cast<size_t>(info.alias))->name +
                                      "' without 'inplace', got overlapping memory");
    }
  }
}

void Arguments::add_tensor(const ehc_tensor_info& info, size_t position, const TVMFFIAny& value) {
  if (info.is_list != 0) return add_list(info, value);
  tensors_[position] = to_tensor(info, value);
}

void Arguments::add_list(const ehc_tensor_info& info, const TVMFFIAny& value) {
  if (!is_sequence(value)) refuse("tensor", info.name, "a sequence of arrays", value);
  const std::string_view pattern(info.name);  // "pre.L"
  const std::string stem(pattern.substr(0, pattern.find('.') + 1));
  const std::span<const TVMFFIAny> tensors = items(value);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = names_.emplace_back(stem + std::to_string(i));
    named_.push_back({name.c_str(), info.is_output, to_tensor(info, tensors[i])});
  }
}

const ehc_tensor* Arguments::keep(const ehc_tensor& tensor) { return &kept_.emplace_back(tensor); }

const ehc_tensor* Arguments::to_tensor(const ehc_tensor_info& info, const TVMFFIAny& value) {
  const ehc_tensor* tensor = dlpack(value);
  if (tensor == nullptr) {
    if (!is_sequence(value)) refuse("tensor", info.name, "an array", value);
    tensor = described(info, items(value));
    if (tensor == nullptr) refuse("tensor", info.name, "an array", value);
  }
  if (!has_device_) {
    device_ = tensor->device;
    has_device_ = true;
  }
  const auto is_known = [&](const NamedType& known) { return same(known.type, tensor->dtype); };
  if (std::none_of(kTypes, kTypes + kTaken, is_known)) {
    throw Failure(EHC_CONTRACT, std::string(op_.name) + ": tensor '" + info.name + "': expected " +
                                    type_names(info) + ", got " + text_of(*tensor));
  }
  return tensor;
}

// (tensor, type) or (type, dim, ...).
const ehc_tensor* Arguments::described(const ehc_tensor_info& info,
                                       std::span<const TVMFFIAny> parts) {
  const auto type_of = [&](const TVMFFIAny& name) {
    const std::string wanted = text(name);
    const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                     [&](const NamedType& t) { return t.name == wanted; });
    if (found == std::end(kTypes)) refuse("tensor", info.name, "the name of a type", name);
    return found->type;
  };
  if (parts.size() == 2 && dlpack(parts[0]) != nullptr && is_text(parts[1])) {
    ehc_tensor tensor = *dlpack(parts[0]);
    tensor.dtype = type_of(parts[1]);
    return keep(tensor);
  }
  if (parts.empty() || !is_text(parts[0]) || parts.size() > EHC_MAX_RANK + 1) return nullptr;
  auto& shape = shapes_.emplace_back();
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].type_index != kTVMFFIInt) return nullptr;
    shape[i - 1] = parts[i].v_int64;
  }
  return keep({.data = nullptr,
               .device = {EHC_HOST, 0},
               .ndim = static_cast<int32_t>(parts.size() - 1),
               .dtype = type_of(parts[0]),
               .shape = shape.data(),
               .strides = nullptr,
               .byte_offset = 0});
}

void Arguments::add_attribute(const ehc_attribute_info& info, size_t position,
                              const TVMFFIAny& value) {
  ehc_attribute out{};
  out.position = static_cast<int32_t>(position);
  if (value.type_index == kTVMFFIBool) {
    out.type = EHC_BOOLEAN;
    out.integer = value.v_int64;
  } else if (value.type_index == kTVMFFIInt) {
    out.type = EHC_INTEGER;
    out.integer = value.v_int64;
  } else if (value.type_index == kTVMFFIFloat) {
    out.type = EHC_REAL;
    out.real = value.v_float64;
  } else if (is_text(value)) {
    out.type = EHC_TEXT;
    out.text = names_.emplace_back(text(value)).c_str();
  } else if (is_sequence(value)) {
    std::vector<int64_t>& integers = integers_.emplace_back();
    for (const TVMFFIAny& item : items(value)) {
      if (item.type_index != kTVMFFIInt) refuse("attribute", info.name, "integers", item);
      integers.push_back(item.v_int64);
    }
    out.type = EHC_INTEGERS;
    out.integers = integers.data();
    out.count = integers.size();
  } else {
    refuse("attribute", info.name, "a number, a string or a sequence of integers", value);
  }
  attributes_.push_back(out);
}

void Arguments::refuse(const char* kind, const char* name, const std::string& expected,
                       const TVMFFIAny& got) const {
  throw Failure(EHC_CONTRACT, std::string(op_.name) + ": " + kind + " '" + name + "': expected " +
                                  expected + ", got " + kind_of(got));
}

}  // namespace ehc::python
