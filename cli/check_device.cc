// What is required of a device alone: the same bits outside a graph and on the default stream, with
// any grid, run after run; and of many tokens, by repeating those of a case.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

#include "cli/checker.h"
#include "cli/integers.h"
#include "core/cuda_support.h"
#include "core/forced_grid.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"

namespace ehc::cli {

void Checker::check_grids(const CaseInputs& inputs, const RunResult& base, Layout layout,
                          CheckRow& row) {
  for (const int64_t blocks : {1, 7, 4096}) {
    const ForcedGrid grid(blocks);
    const RunResult again =
        run_case(inputs, inputs.tensors(), context(), {row.implementation, layout, 0x36});
    if (!sound(inputs, again, row)) continue;
    const std::string what = differing_bits(inputs, base, again);
    if (what.empty()) continue;
    fail_row(inputs.line(), row, fmt::format("{} with a grid of {}", what, blocks));
  }
}

void Checker::check_device(const CaseInputs& inputs, const RunResult& base, CheckRow& row) {
  const CaseLine& line = inputs.line();
  Context on_default_stream = Context::cuda(0, nullptr);
  const RunResult again = run_case(inputs, inputs.tensors(), on_default_stream,
                                   {row.implementation, Layout::contiguous, 0x35});
  if (sound(inputs, again, row)) {
    const std::string what = differing_bits(inputs, base, again);
    if (!what.empty()) {
      fail_row(line, row, what + " with other memory, on the default stream");
    }
  }
  if (options_.repeats < 1) return;
  PlacedCase placed(inputs, inputs.tensors(), context(),
                    {row.implementation, Layout::contiguous, 0xcd});
  placed.run();
  const int64_t different = placed.count_differing_repeats(options_.repeats);
  if (different > 0) {
    fail_row(line, row,
             fmt::format("{} pieces of 16 bytes differ between {} runs", different,
                         options_.repeats + 1));
  }
}

namespace {

// A tensor on the device that has the tokens of another one `times` times.
struct Repeated {
  Buffer memory;
  Tensor tensor;
};

// Bytes of the tokens of one entry of the axes before `axis`, and how many such entries there are.
struct Blocks {
  int64_t count = 1;
  size_t bytes = 0;
};
Blocks blocks_of(const Tensor& t, int axis) {
  Blocks blocks;
  for (int k = 0; k < axis; ++k) blocks.count *= t.shape[k];
  blocks.bytes = blocks.count == 0 ? 0 : bytes_of(t) / static_cast<size_t>(blocks.count);
  return blocks;
}

Repeated repeat_tokens(const Context& context, const Tensor& host, int axis, int64_t times) {
  Repeated out;
  Tensor& t = out.tensor;
  t = host;
  t.shape[axis] *= times;
  t = Tensor(nullptr, t.dtype, t.shape, t.rank, context.device(), context.device_index());
  out.memory = Buffer(context, bytes_of(t));
  t.data = out.memory.data();
  Buffer once(context, bytes_of(host));
  once.upload(host.data);
  const Blocks blocks = blocks_of(host, axis);
  auto* to = static_cast<std::byte*>(out.memory.data());
  for (int64_t b = 0; b < blocks.count && blocks.bytes > 0; ++b) {
    const auto* from =
        static_cast<const std::byte*>(once.data()) + static_cast<size_t>(b) * blocks.bytes;
    std::byte* block = to + static_cast<size_t>(b * times) * blocks.bytes;
    const auto copy = [&](size_t at, const std::byte* source, size_t bytes) {
      cuda_support::copy_within_device(context.device_index(), context.stream(), block + at, source,
                                       bytes);
    };
    copy(0, from, blocks.bytes);
    const size_t all = static_cast<size_t>(times) * blocks.bytes;
    for (size_t done = blocks.bytes; done < all; done *= 2) {
      copy(done, block, std::min(done, all - done));
    }
  }
  synchronize(context);
  return out;
}

// The sequences of the tokens `times` times; without `borders` they are one.
Repeated repeat_sequences(const Context& context, const Tensor* borders, int64_t tokens,
                          int64_t times) {
  std::vector<int32_t> all = {0};
  for (int64_t i = 0; i < times; ++i) {
    const int64_t sequences = borders != nullptr ? borders->numel() - 1 : 1;
    for (int64_t s = 1; s <= sequences; ++s) {
      const int64_t end = borders != nullptr ? integer_at(*borders, s) : tokens;
      all.push_back(static_cast<int32_t>(i * tokens + end));
    }
  }
  Repeated out;
  out.memory = Buffer(context, all.size() * sizeof(int32_t));
  out.memory.upload(all.data());
  out.tensor = Tensor(out.memory.data(), DType::i32, {static_cast<int64_t>(all.size())},
                      context.device(), context.device_index());
  return out;
}

}  // namespace

// `tokens=N`: the tokens of the case, repeated until there are N or more, so that offsets may go
// beyond what memory of the host or 32 bits hold. Each repetition must have the bits of the case;
// where the contract promises none (backward operators, BatchDependent), differing bits are
// compared by the rule, in the first, a middle and the last repetition.
void Checker::check_many_tokens(const CaseInputs& inputs, const Expected& expected,
                                const RunResult& base, CheckRow& row) {
  const CaseLine& line = inputs.line();
  const int64_t wanted = std::atoll(line.get("tokens", "0").c_str());
  const int64_t tokens = inputs.tokens();
  if (wanted <= 0 || tokens == 0) return;
  const int64_t times = (wanted + tokens - 1) / tokens;
  Context& on = context();
  DynamicCall call(op_);
  inputs.prepare(call);
  std::vector<Repeated> placed;
  for (size_t i = 0; i < inputs.tensors().size(); ++i) {
    const TensorSpec& spec = inputs.spec_of(i);
    const Tensor& host = inputs.tensors()[i];
    if (spec.is_output) continue;
    if (spec.name == "cu_seqlens") {
      placed.push_back(repeat_sequences(on, host.present() ? &host : nullptr, tokens, times));
    } else if (host.present()) {
      const int axis = token_axis(spec.shape);
      placed.push_back(repeat_tokens(on, host, std::max(axis, 0), axis < 0 ? 1 : times));
    } else {
      continue;
    }
    call.tensor(i) = placed.back().tensor;
  }
  const std::vector<Tensor> made = call.outputs();
  for (size_t i = 0; i < made.size(); ++i) {
    if (!made[i].present()) continue;
    Repeated& output = placed.emplace_back();
    output.memory = Buffer(on, bytes_of(made[i]));
    output.tensor = Tensor(output.memory.data(), made[i].dtype, made[i].shape, made[i].rank,
                           on.device(), on.device_index());
    call.tensor(i) = output.tensor;
  }
  for (const auto& [output, input] : call.shared_memory()) {
    if (made[output].present()) call.tensor(output) = call.tensor(input);
  }
  on.set_implementation(row.implementation);
  const Buffer workspace(on, call.plan(on).workspace_bytes);
  on.set_workspace(workspace.data(), workspace.bytes());
  call.run(on);
  synchronize(on);
  on.set_workspace(nullptr, 0);

  // (Sequences repeat as a whole, so they promise it too.)
  const bool promised =
      !op_.schema.name.ends_with("_bwd") && token_bits(op_.schema) != TokenBits::count;
  for (size_t i = 0; i < base.outputs.size(); ++i) {
    const Tensor& one = base.outputs[i].tensor;
    const Tensor& many = call.tensor(base.outputs[i].slot);
    int axis = -1;
    for (int k = 0; k < one.rank; ++k) {
      if (one.shape[k] == tokens && many.shape[k] == tokens * times) axis = k;
    }
    // Not of sums over tokens, nor of as many splits as T asks for.
    if (axis < 0 || one.numel() == 0 || many.numel() != one.numel() * times) continue;
    Buffer once(on, bytes_of(one));
    once.upload(one.data);
    unsigned different = 0;
    Buffer count(on, sizeof different);
    count.upload(&different);
    const Blocks blocks = blocks_of(one, axis);
    const auto at = [&](int64_t block, int64_t time) {
      return many.as<std::byte>() + static_cast<size_t>(block * times + time) * blocks.bytes;
    };
    for (int64_t b = 0; b < blocks.count; ++b) {
      const auto* want =
          static_cast<const std::byte*>(once.data()) + static_cast<size_t>(b) * blocks.bytes;
      cuda_support::count_differences(on.device_index(), on.stream(), at(b, 0), want, blocks.bytes,
                                      count.data(), times);
    }
    count.download(&different);
    if (different == 0) continue;
    const std::string name = inputs.name_of(base.outputs[i].slot);
    std::vector<std::byte> got(bytes_of(one));
    for (const int64_t time : {int64_t{0}, times / 2, times - 1}) {
      for (int64_t b = 0; b < blocks.count; ++b) {
        cuda_support::copy_to_host(on.device_index(), on.stream(),
                                   got.data() + static_cast<size_t>(b) * blocks.bytes, at(b, time),
                                   blocks.bytes);
      }
      const Tensor part(got.data(), one.dtype, one.shape, one.rank);
      const bool equal = promised ? first_difference(part, one).empty()
                                  : compare(part, expected.reference.outputs[i].tensor,
                                            tolerance_of(line, expected, i), false)
                                        .equal;
      if (!equal) {
        return fail_row(line, row,
                        fmt::format("'{}' differs in repetition {} of {}, {} pieces of 16 bytes in "
                                    "all",
                                    name, time, times, different));
      }
    }
    if (promised) {
      fail_row(line, row,
               fmt::format("'{}': {} pieces of 16 bytes differ in {} repetitions", name, different,
                           times));
    }
  }
}

}  // namespace ehc::cli
