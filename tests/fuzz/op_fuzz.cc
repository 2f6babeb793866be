// Any operator on any arguments: it runs, or it is refused with ehc::Error. Bytes choose the
// operator, attributes as text, and for each tensor its type, shape, strides and content; mostly
// what the table asks for, so that calls get past the checks, and now and then something else.
// Every tensor has memory of its own of exactly the bytes that it may touch (AddressSanitizer sees
// the rest); sizes are kept small.
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "core/bind.h"
#include "core/dynamic_call.h"
#include "core/linear.h"
#include "core/registry.h"
#include "ehc/error.h"

namespace {

using ehc::DType;
using ehc::Tensor;
using ehc::TensorSpec;

constexpr int64_t kMostElements = 1 << 12;

class Fuzz {
 public:
  Fuzz(const uint8_t* data, size_t size) : bytes_(data, size) {}

  void run() {
    const auto operators = ehc::all_operators();
    ehc::DynamicCall call(
        *operators[bytes_.ConsumeIntegralInRange<size_t>(0, operators.size() - 1)]);
    for (int s = 0; s < ehc::kSymbolCount; ++s) {
      symbols_.set(static_cast<ehc::Symbol>(s),
                   bytes_.PickValueInArray<int64_t>({2, 1, 3, 4, 0, 5}));
    }
    set_attributes(call);
    set_list_lengths(call);
    for (size_t i = 0; i < call.slots(); ++i) {
      const TensorSpec& spec = call.spec_of(i);
      if (spec.is_output || chance(spec.is_optional && !spec.is_list ? 128 : 4)) continue;
      call.tensor(i) = any_tensor(spec);
    }
    set_outputs(call);
    run_on_memory(call);
  }

 private:
  // Never once the bytes are used up: what is left of the call is then as it should be.
  bool chance(int of_256) { return bytes_.ConsumeIntegral<uint8_t>() >= 256 - of_256; }

  void set_attributes(ehc::DynamicCall& call) {
    constexpr const char* kTexts[] = {
        "1",   "0",   "",    "2",    "3",     "4",     "-1",  "1e-6",
        "1.5", "inf", "nan", "true", "false", "1,2,3", "7,9", "9223372036854775807"};
    for (const ehc::AttributeSpec& a : call.schema().attributes) {
      if (chance(64)) continue;
      std::string text;
      if (chance(16)) {
        text = bytes_.ConsumeRandomLengthString(24);
      } else if (a.type == ehc::AttributeType::choice) {
        text = ehc::choice_name(a.choices,
                                bytes_.ConsumeIntegralInRange<int64_t>(
                                    0, std::count(a.choices.begin(), a.choices.end(), '/')));
      } else if (a.type == ehc::AttributeType::boolean) {
        text = bytes_.ConsumeBool() ? "true" : "false";
      } else {
        text = bytes_.PickValueInArray(kTexts);
      }
      call.set_attribute_text(a.name, text);
    }
  }

  // Mostly what the symbols of this run say, or none at all where that is allowed.
  void set_list_lengths(ehc::DynamicCall& call) {
    const auto& tensors = call.schema().tensors;
    const bool optional_ones = bytes_.ConsumeBool();
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].is_list || tensors[i].is_output) continue;
      int64_t length = dimension(tensors[i].length);
      if (tensors[i].is_optional && !optional_ones) length = 0;
      if (chance(4)) length = bytes_.ConsumeIntegralInRange<int64_t>(0, 5);
      call.set_list_length(i, static_cast<size_t>(length));
    }
  }

  // Value of a dimension with the symbols of this run; 0 where there is none.
  int64_t dimension(const ehc::Expression& e) const {
    const ehc::Linear v = ehc::evaluate(e, symbols_);
    return v.solvable ? std::max<int64_t>(v.value, 0) : 0;
  }

  Tensor any_tensor(const TensorSpec& spec) {
    Tensor t;
    std::vector<DType> types;
    for (int i = 1; i < ehc::kDTypeCount; ++i) {
      if (ehc::contains(spec.dtypes, static_cast<DType>(i))) types.push_back(static_cast<DType>(i));
    }
    t.dtype = chance(4)
                  ? static_cast<DType>(bytes_.ConsumeIntegralInRange<int>(1, ehc::kDTypeCount - 1))
              : spec.dtype_rule == ehc::DTypeRule::activation
                  ? activation_
                  : types[bytes_.ConsumeIntegralInRange<size_t>(0, types.size() - 1)];
    const ehc::Shape& shape = spec.shape;
    for (uint8_t k = 0; k < shape.rank; ++k) {
      if (shape.dims[k].optional_axis && bytes_.ConsumeBool()) continue;
      t.shape[t.rank++] = dimension(shape.dims[k]);
    }
    if (chance(8)) t.rank = bytes_.ConsumeIntegralInRange<int8_t>(-1, ehc::kMaxRank);
    if (t.rank > 0 && chance(8)) {
      t.shape[bytes_.ConsumeIntegralInRange<int>(0, t.rank - 1)] = any_integer();
    }
    lay_out(t);
    give_memory(t);
    return t;
  }

  int64_t any_integer() {
    constexpr int64_t kValues[] = {
        -1, 0, 1, 2, 7, 1 << 20, int64_t{1} << 31, int64_t{1} << 60, INT64_MAX, INT64_MIN};
    return bytes_.PickValueInArray(kValues);
  }

  // Row-major, with room between rows, or anything.
  void lay_out(Tensor& t) {
    const int64_t pad = chance(48) ? bytes_.ConsumeIntegralInRange<int64_t>(0, 3) : 0;
    int64_t step = 1;
    for (int k = t.rank - 1; k >= 0; --k) {
      t.stride[k] = chance(3) ? any_integer() : step;
      int64_t rows = 0;
      if (__builtin_mul_overflow(step, std::max<int64_t>(t.shape[k], 1), &rows) ||
          __builtin_add_overflow(rows, pad, &step)) {
        step = 1;
      }
    }
  }

  // Elements up to the last one that the strides reach; -1 when too many, or below the first.
  static int64_t extent(const Tensor& t) {
    int64_t last = 0;
    for (int k = 0; k < t.rank; ++k) {
      if (t.shape[k] == 0) return 0;
      int64_t span = 0;
      if (t.shape[k] < 0 || t.stride[k] < 0 ||
          __builtin_mul_overflow(t.shape[k] - 1, t.stride[k], &span) ||
          __builtin_add_overflow(last, span, &last) || last >= kMostElements) {
        return -1;
      }
    }
    return last + 1;
  }

  // Without memory when it is too large; such a call is checked and not run.
  void give_memory(Tensor& t) {
    const int64_t elements = extent(t);
    if (elements < 0 || chance(2)) {
      has_memory_ = false;
      return;
    }
    const size_t size = static_cast<size_t>(elements) * ehc::size_of(t.dtype);
    memory_.push_back(std::make_unique<uint8_t[]>(size));
    t.data = memory_.back().get();
    fill(memory_.back().get(), size, t.dtype);
  }

  void fill(uint8_t* at, size_t size, DType dtype) {
    const std::vector<uint8_t> seed =
        bytes_.ConsumeBytes<uint8_t>(bytes_.ConsumeIntegralInRange<size_t>(0, 16));
    const bool small = chance(160);
    const size_t width = ehc::size_of(dtype);
    const bool integer = dtype == DType::i32 || dtype == DType::i64;
    for (size_t i = 0; i < size && !seed.empty(); ++i) {
      at[i] = seed[(small && integer ? i / width : i) % seed.size()];
      if (!small) continue;
      if (dtype == DType::boolean) at[i] &= 1;
      if (integer) at[i] = i % width == 0 ? at[i] % 8 : 0;  // counts, ids, offsets
    }
  }

  // Mostly what the call makes; sometimes the memory of an input, or anything.
  void set_outputs(ehc::DynamicCall& call) {
    const std::vector<Tensor> made = call.outputs();
    for (size_t i = 0; i < made.size(); ++i) {
      const TensorSpec& spec = call.spec_of(i);
      if (!spec.is_output) continue;
      if (chance(4)) {
        call.tensor(i) = any_tensor(spec);
      } else if (chance(24) && spec.alias_index >= 0) {
        call.tensor(i) = call.tensor(call.slot_at(static_cast<size_t>(spec.alias_index)));
      } else if (made[i].present() && !chance(4)) {
        Tensor& t = call.tensor(i);
        t = made[i];
        if (t.rank > 0) lay_out(t);
        give_memory(t);
      }
    }
    for (const auto& [output, input] : call.shared_memory()) {
      if (!chance(16)) call.tensor(output) = call.tensor(input);
    }
  }

  void run_on_memory(ehc::DynamicCall& call) {
    if (!has_memory_) {
      call.check(ehc::Device::cpu, 0);
      return;
    }
    ehc::Context context = ehc::Context::cpu(1);
    const auto& list = call.op().implementations;
    context.set_implementation(
        list[bytes_.ConsumeIntegralInRange<size_t>(0, list.size() - 1)].name);
    const size_t needed = call.plan(context).workspace_bytes;
    std::vector<uint8_t> workspace(std::min<size_t>(needed, 1 << 22));
    context.set_workspace(workspace.data(), workspace.size());
    call.run(context);
  }

  FuzzedDataProvider bytes_;
  ehc::SymbolValues symbols_;
  const DType activation_ = static_cast<DType>(bytes_.ConsumeIntegralInRange<int>(1, 3));
  std::vector<std::unique_ptr<uint8_t[]>> memory_;
  bool has_memory_ = true;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    Fuzz(data, size).run();
  } catch (const ehc::Error& error) {
    const char* text = error.what();
    if (*text == '\0') std::abort();
  }
  return 0;
}
