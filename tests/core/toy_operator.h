// A small operator that uses every feature of the tables, for tests of what reads them.
#pragma once

#include "core/operator.h"
#include "core/parallel.h"

namespace ehc::toy {

struct Toy {
  enum class Mode { add, copy };
  Tensor x{};       // A[T,n,d]
  Tensor both{};    // A[T,n+1,d], or
  Tensor left{};    // A[T,n,d] and
  Tensor right{};   // A[T,d]
  Tensor table{};   // I32/I64[L,C], packed
  Tensor first{};   // F32[n], with
  Tensor second{};  // F32[n]
  Tensor state{};   // F32[B,(w-1)*dilation,n,d]
  Tensor out{};     // A[T,n,d]
  Tensor norm{};    // F32[T,n]
  Tensor rows{};    // X[T]
  Tensor state_out{};
  std::optional<double> eps;
  std::optional<double> rate;
  int64_t count = 2;
  Mode mode = Mode::add;
  std::span<const int64_t> sizes{};
  int64_t dilation = 1;
};

using P = Toy;

inline constexpr auto kTable = table(
    "toy", "0", "a test operator", in<&P::x>("x", "A[T,n,d]"),
    in<&P::both>("both", "A[T,n+1,d]").optional(), in<&P::left>("left", "A[T,n,d]").optional(),
    in<&P::right>("right", "A[T,d]").optional(), one_of("both | left right"),
    in<&P::table>("table", "I32/I64[L,C]").optional().packed(),
    in<&P::first>("first", "F32[n]").optional(), in<&P::second>("second", "F32[n]").optional(),
    all_or_none("first second"), in<&P::state>("state", "F32[B,(w-1)*dilation,n,d]").optional(),
    attribute<&P::eps>("eps").positive(),
    attribute<&P::rate>("rate").at_least(0).required_with("table"),
    attribute<&P::count>("count").between(1, 8), attribute<&P::mode>("mode", "add/copy"),
    attribute<&P::sizes>("sizes").at_least(1).required_with("first"),
    attribute<&P::dilation>("dilation").at_least(1).fixes("dilation"), call_flag("save"),
    call_flag("inplace"), call_choice("index_dtype", "I32/I64", "I32"),
    out<&P::out>("out", "A[T,n,d]").may_alias("x"), out<&P::norm>("norm", "F32[T,n]", "save"),
    out<&P::rows>("rows", "X:I32/I64[T]", "table").dtype_from("index_dtype"),
    out<&P::state_out>("state", "F32[B,(w-1)*dilation,n,d]", "state").may_alias("state"));

// out = 2 * x in fp32; norm and rows are cleared. Enough to see that a call ran.
inline void run(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const int64_t n = call.bound["n"];
  const int64_t d = call.bound["d"];
  parallel_for(call.context, call.bound["T"], 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < n; ++h) {
        const float* x = p.x.as<float>() + t * p.x.stride[0] + h * p.x.stride[1];
        float* out = p.out.as<float>() + t * p.out.stride[0] + h * p.out.stride[1];
        for (int64_t i = 0; i < d; ++i) out[i] = 2 * x[i];
        if (p.norm) p.norm.as<float>()[t * p.norm.stride[0] + h] = 0;
      }
      if (p.rows.dtype == DType::i32) p.rows.as<int32_t>()[t] = 0;
      if (p.rows.dtype == DType::i64) p.rows.as<int64_t>()[t] = 0;
    }
  });
}

inline std::string_view refuse_wide(const Call& call) {
  return call.bound["d"] > 4 ? "d > 4" : std::string_view();
}
inline size_t scratch(const Call& call) { return static_cast<size_t>(call.bound["T"]) * 16; }

inline constexpr Implementation kImplementations[] = {
    {"cpu.narrow", Device::cpu, &refuse_wide, &run, nullptr},
    {"cpu.scratch", Device::cpu, nullptr, &run, &scratch},
    {"reference", Device::cpu, nullptr, &run, nullptr},
};

inline constexpr Operator kOperator = make_operator<P>(kTable, kImplementations);

}  // namespace ehc::toy
