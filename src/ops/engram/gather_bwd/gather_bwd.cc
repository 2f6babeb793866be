#include "ehc/engram/gather_bwd.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "backends/cpu/cache.h"
#include "backends/cpu/isa.h"
#include "core/parallel.h"
#include "core/registry.h"
#include "core/workspace.h"
#include "ops/engram/gather_bwd/gather_bwd_args.h"
#include "ops/engram/gather_bwd/gather_bwd_math.h"
#include "ops/engram/shared/check_indices.h"
#include "ops/engram/shared/row_order.h"

namespace ehc::engram {

// Rows [begin, end). `sums` [hd]: scratch.
template <class Real>
void gather_bwd_reference_dense(const GatherBackwardArgs& args, const RowIndices& indices,
                                int64_t tokens, int64_t begin, int64_t end, Real* sums);
// Returns the number of unique rows.
template <class Real>
int64_t gather_bwd_reference_sparse(const GatherBackwardArgs& args, const RowIndices& indices,
                                    int64_t tokens, Real* sums);
size_t gather_bwd_cuda_workspace(int64_t count, int64_t rows, int64_t width, bool fills);
void gather_bwd_cuda(const GatherBackwardArgs& args, const RowIndices& indices, int64_t tokens,
                     int64_t rows, int64_t* unique_count, void* workspace, int device,
                     void* stream);

namespace {

using P = GatherBackward;

constexpr auto kTable = table(
    "engram.gather_bwd", "1.6", "gradient of the addressed table rows",
    in<&P::grad_embedding>("grad_embedding", "A[T,C*hd]"),
    in<&P::indices>("indices", "I32/I64[T,C]"),
    in<&P::grad_table_acc>("grad_table_acc", "F32[rows,hd]").optional(),
    attribute<&P::rows>("rows").at_least(0).required_without("grad_table_acc").fixes("rows"),
    call_choice("form", "dense/sparse", "dense"),
    out<&P::grad_table>("grad_table", "F32[rows,hd]", "form=dense").may_alias("grad_table_acc"),
    out<&P::unique_rows>("unique_rows", "X:I32/I64[U]", "form=sparse").dtype_from("indices"),
    out<&P::grad_rows>("grad_rows", "F32[U,hd]", "form=sparse"),
    one_of("grad_table | unique_rows grad_rows"), flops("T*C*hd"));

// Room for as many unique rows as there are indices.
void bind_capacity(Bound& b, const void*) {
  int64_t capacity = 0;
  if (__builtin_mul_overflow(b["T"], b["C"], &capacity) || capacity > int64_t{1} << 48) {
    fail_tensor(kTable.view(), "indices", "at most 2^48 elements", "more");
  }
  b.symbols.set(symbol("U"), capacity);
}

void check(const Schema& schema, const Bound& b, const void* params) {
  const P& p = *static_cast<const P*>(params);
  if (p.grad_rows && p.grad_table_acc) {
    fail_tensor(schema, "grad_table_acc", "none: the sparse form has no target",
                describe(p.grad_table_acc));
  }
  check_row_indices(schema, b, p.indices);
}

GatherBackwardArgs make_args(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const Bound& b = call.bound;
  const bool dense = p.grad_table.present();
  const Tensor& out = dense ? p.grad_table : p.grad_rows;
  // In place: rows that no index names stay as they are.
  const bool inplace = p.grad_table_acc.present() && p.grad_table_acc.data == out.data;
  const auto written = static_cast<size_t>((dense ? b["rows"] : b["U"]) * b["hd"]) * sizeof(float);
  return {.columns = b["C"],
          .width = b["hd"],
          .type = p.grad_embedding.dtype,
          .grad = p.grad_embedding.data,
          .grad_token_stride = p.grad_embedding.stride[0],
          .wide = false,
          .entries = nullptr,
          .entry_count = 0,
          .dense = dense,
          .fill = dense && !inplace,
          .target = p.grad_table_acc ? p.grad_table_acc.as<const float>() : nullptr,
          .target_stride = p.grad_table_acc.stride[0],
          .out = out.as<float>(),
          .out_stride = out.stride[0],
          .unique_rows = p.unique_rows.data,
          .unique_is_64 = p.unique_rows.dtype == DType::i64,
          .partials = nullptr,
          .streaming = !inplace && written > last_level_cache_bytes()};
}

// Entries of -1 behind the last unique row, and the count.
void finish_sparse(const Call& call, int64_t unique) {
  const P& p = *static_cast<const P*>(call.params);
  parallel_for(call.context, call.bound["U"] - unique, 1 << 16, [&](int64_t begin, int64_t end) {
    if (p.unique_rows.dtype == DType::i64) {
      std::fill(p.unique_rows.as<int64_t>() + unique + begin,
                p.unique_rows.as<int64_t>() + unique + end, -1);
    } else {
      std::fill(p.unique_rows.as<int32_t>() + unique + begin,
                p.unique_rows.as<int32_t>() + unique + end, -1);
    }
  });
  if (p.unique_count != nullptr) *p.unique_count = unique;
}

bool fits_32_bits(const Bound& b) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  return b["rows"] <= kMost && b["U"] <= kMost;
}

// The work, in spans of about kSpan entries and rows to fill. Merged in order (a row stands before
// the entries that name it), their sequence is cut evenly.
template <class Word>
struct Scratch {
  static constexpr int64_t kSpan = 2048;

  RowOrder<Word> order;
  int64_t most_spans;
  int64_t* uniques = nullptr;  // of each span: rows that begin there, then those before
  bool* waits = nullptr;       // of each span: does a row of several chains begin there?
  float* partials = nullptr;

  Scratch(const Call& call, bool fill, Workspace& workspace)
      : order(call.context, call.bound["T"], call.bound["C"], call.bound["rows"]) {
    const int64_t capacity = call.bound["U"];
    most_spans = spans((fill ? call.bound["rows"] : 0) + capacity);
    order.place(workspace);
    uniques = workspace.take<int64_t>(most_spans);
    waits = workspace.take<bool>(most_spans);
    partials =
        workspace.take<float>((capacity + kGradientChain - 1) / kGradientChain * call.bound["hd"]);
  }
  static int64_t spans(int64_t items) { return (items + kSpan - 1) / kSpan; }
};

struct Cuts {
  const GatherBackwardArgs& args;
  int64_t rows;  // 0 when none is filled
  int64_t items() const { return rows + args.entry_count; }

  // Entries among the first `items`; the rest are rows.
  template <class Word>
  int64_t entries_before(int64_t items) const {
    if (rows == 0) return std::min(items, args.entry_count);
    const auto* entries = static_cast<const RowEntry<Word>*>(args.entries);
    int64_t low = 0;
    int64_t high = args.entry_count;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (static_cast<int64_t>(entries[middle].row) + 1 + middle < items) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  template <class Word>
  GatherBackwardSpan span(int64_t index, int64_t size) const {
    const int64_t begin = index * size;
    const int64_t end = std::min(begin + size, items());
    const int64_t first = entries_before<Word>(begin);
    const int64_t last = end == items() ? args.entry_count : entries_before<Word>(end);
    if (rows == 0) return {first, last, 0, 0, 0};
    return {first, last, begin - first, end - last, 0};
  }
};

template <class Word, auto Sum, auto Add>
void run_on(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  GatherBackwardArgs args = make_args(call);
  Workspace workspace(call.context.workspace());
  const Scratch<Word> scratch(call, args.fill, workspace);
  if (call.bound["U"] > 0) {
    args.entries = scratch.order.sort(call.context, row_indices_of(p.indices), args.entry_count);
  }
  args.wide = sizeof(Word) == 8;
  args.partials = scratch.partials;

  const auto* entries = static_cast<const RowEntry<Word>*>(args.entries);
  const Cuts cuts = {args, args.fill ? call.bound["rows"] : 0};
  const int64_t spans = scratch.spans(cuts.items());
  const auto each_span = [&](const auto& body) {
    call.context.executor().run(spans, [&](int64_t s) {
      GatherBackwardSpan span = cuts.template span<Word>(s, scratch.kSpan);
      if (!args.dense) span.first_unique = scratch.uniques[s];
      body(s, span);
    });
  };
  if (!args.dense) {
    call.context.executor().run(spans, [&](int64_t s) {
      const GatherBackwardSpan span = cuts.template span<Word>(s, scratch.kSpan);
      scratch.uniques[s] = 0;
      for (int64_t i = span.first_entry; i < span.last_entry; ++i) {
        scratch.uniques[s] += begins_row(entries, i) ? 1 : 0;
      }
    });
    int64_t unique = 0;
    for (int64_t s = 0; s < spans; ++s) unique += std::exchange(scratch.uniques[s], unique);
    finish_sparse(call, unique);
  }
  each_span([&](int64_t s, const GatherBackwardSpan& span) { scratch.waits[s] = Sum(args, span); });
  if (std::find(scratch.waits, scratch.waits + spans, true) == scratch.waits + spans) return;
  each_span([&](int64_t s, const GatherBackwardSpan& span) {
    if (scratch.waits[s]) Add(args, span);
  });
}

template <auto Sum, auto Add>
void run_cpu(const Call& call) {
  if (fits_32_bits(call.bound)) {
    run_on<uint32_t, Sum, Add>(call);
  } else {
    run_on<uint64_t, Sum, Add>(call);
  }
}

size_t workspace(const Call& call) {
  Workspace needed(nullptr);
  const bool fill = make_args(call).fill;
  if (fits_32_bits(call.bound)) {
    Scratch<uint32_t>(call, fill, needed);
  } else {
    Scratch<uint64_t>(call, fill, needed);
  }
  return needed.bytes();
}

template <class Real>
size_t reference_workspace(const Call& call) {
  Workspace needed(nullptr);
  needed.take<Real>(call.context.executor().concurrency() * call.bound["hd"]);
  return needed.bytes();
}

template <class Real>
void run_reference(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  const GatherBackwardArgs args = make_args(call);
  const RowIndices indices = row_indices_of(p.indices);
  const int64_t tokens = call.bound["T"];
  Workspace workspace(call.context.workspace());
  Real* sums = workspace.take<Real>(call.context.executor().concurrency() * args.width);
  if (!args.dense) {
    return finish_sparse(call, gather_bwd_reference_sparse(args, indices, tokens, sums));
  }
  Pieces(call.context, call.bound["rows"], 1)
      .run(call.context, [&](int64_t piece, int64_t begin, int64_t end) {
        gather_bwd_reference_dense(args, indices, tokens, begin, end, sums + piece * args.width);
      });
}

#if EHC_HAS_CUDA
size_t workspace_cuda(const Call& call) {
  const Bound& b = call.bound;
  return gather_bwd_cuda_workspace(b["U"], b["rows"], b["hd"], make_args(call).fill);
}

void run_cuda(const Call& call) {
  const P& p = *static_cast<const P*>(call.params);
  gather_bwd_cuda(make_args(call), row_indices_of(p.indices), call.bound["T"], call.bound["rows"],
                  p.grad_rows.present() ? p.unique_count : nullptr, call.context.workspace(),
                  call.context.device_index(), call.context.stream());
}
#endif

constexpr Implementation kImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_cuda, &workspace_cuda},
#endif
#define EHC_LIST(isa)                                       \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, \
   &run_cpu<&isa::sum_row_gradients, &isa::add_row_chains>, &workspace},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_reference<double>, &reference_workspace<double>},
    {"reference.f32", Device::cpu, nullptr, &run_reference<float>, &reference_workspace<float>},
};

constexpr Operator kGatherBackward = [] {
  Operator op = make_operator<P>(kTable, kImplementations);
  op.derive = &bind_capacity;
  op.rules = &check;
  return op;
}();

}  // namespace

EHC_DEFINE_CALLS(gather_bwd, GatherBackward, kGatherBackward);
EHC_REGISTER(gather_bwd, &kGatherBackward);

}  // namespace ehc::engram
