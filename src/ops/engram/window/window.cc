#include "ehc/engram/window.h"

#include <limits>

#include "core/device_call.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "ops/engram/shared/sequences.h"
#include "ops/engram/window/window_math.h"

namespace ehc::engram {

void window_reference(const WindowArgs& args);
void window_cuda(const WindowArgs& args, int device, void* stream);

namespace {

using P = Window;

constexpr double kLargestId = std::numeric_limits<int32_t>::max();

constexpr auto kTable = table(
    "engram.window", "1.2", "ids that the n-gram hash of each token looks at",
    in<&P::ids>("ids", "I32[T]"), in<&P::cu_seqlens>("cu_seqlens", "I32[B+1]").optional().packed(),
    in<&P::history>("history", "I32[B,Nmax-1]").optional().packed(),
    in<&P::image_token_mask>("image_token_mask", "BOOL[T]").optional().packed(),
    attribute<&P::max_ngram>("max_ngram").between(2, 8).fixes("Nmax"),
    attribute<&P::pad_id>("pad_id").between(0, kLargestId),
    attribute<&P::reset_id>("reset_id").between(-1, kLargestId),
    attribute<&P::blocking>("blocking", "slot/farther"), default_symbol("B", 1, "cu_seqlens"),
    out<&P::window>("window", "I32[T,Nmax]"));

void check_borders(const Schema& schema, const Bound& b, const void* params) {
  check_sequences(schema, static_cast<const P*>(params)->cu_seqlens, b["T"]);
}

WindowArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  return {.ids = p.ids.as<int32_t>(),
          .cu_seqlens = p.cu_seqlens.as<int32_t>(),
          .history = p.history.as<int32_t>(),
          .mask = p.image_token_mask.as<uint8_t>(),
          .window = p.window.as<int32_t>(),
          .window_stride = p.window.stride[0],
          .tokens = call.bound["T"],
          .sequences = call.bound["B"],
          .max_ngram = static_cast<int32_t>(*p.max_ngram),
          .pad_id = static_cast<int32_t>(*p.pad_id),
          .reset_id = static_cast<int32_t>(p.reset_id),
          .farther = *p.blocking == Blocking::farther};
}

// Rows [begin, end), at least one. A known number of slots is unrolled.
template <int32_t kMaxNgram>
void window_rows(const WindowArgs& a, int64_t begin, int64_t end) {
  int64_t sequence = sequence_of(a, begin);
  for (int64_t t = begin; t < end; ++sequence) {
    const int64_t start = sequence_start(a, sequence);
    const int64_t stop = std::min(end, sequence_end(a, sequence));
    for (; t < stop; ++t) {
      window_row(a, kMaxNgram > 0 ? kMaxNgram : a.max_ngram, t, sequence, start,
                 a.window + t * a.window_stride);
    }
  }
}

void run_cpu(const Call& call) {
  const WindowArgs args = make_args(call);
  parallel_for(call.context, args.tokens, 4096, [&](int64_t begin, int64_t end) {
    switch (args.max_ngram) {
      case 3:
        return window_rows<3>(args, begin, end);
      case 4:
        return window_rows<4>(args, begin, end);
      default:
        return window_rows<0>(args, begin, end);
    }
  });
}

void run_reference(const Call& call) { window_reference(make_args(call)); }

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_on_device<&make_args, &window_cuda>, nullptr},
#endif
    {"cpu", Device::cpu, nullptr, &run_cpu, nullptr},
    {"reference", Device::cpu, nullptr, &run_reference, nullptr},
};

constexpr Operator kWindow = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.rules = &check_borders;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(window, Window, kWindow);
EHC_REGISTER(window, &kWindow);

}  // namespace ehc::engram
