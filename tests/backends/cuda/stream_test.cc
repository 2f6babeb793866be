// Order on a stream, streams beside each other, graphs that are replayed.
#include <thread>

#include "tests/backends/cuda/device_support.h"

namespace ehc {
namespace {

using test::bits_of;
using test::first_case;
using test::operators_on;

// Streams expanded and collapsed again and again without waiting in between; both are exact.
TEST(CudaStream, CallsFollowEachOther) {
  EHC_NEEDS_DEVICE();
  const Operator& op = *find_operator("mhc.pre_apply_fwd");
  const cli::CaseInputs inputs(
      op, cli::parse_cases("mhc.pre_apply_fwd T=4001 n=4 d=1280 A=F32", "test").front());
  const auto bits_after = [&](const Context& context) {
    test::NamedCalls calls = test::calls_with(context, inputs);
    Context on = context;
    DynamicCall collapse(op);
    DynamicCall expand(*find_operator("mhc.expand_fwd"));
    calls.call("mhc.pre_apply_fwd", {}, {{"residual", "residual"}, {"pre", "pre"}}, {});
    collapse.set_input("residual", calls.at("residual"));
    collapse.set_input("pre", calls.at("pre"));
    collapse.set_output("layer_input", calls.at("layer_input"));
    expand.set_input("hidden", calls.at("layer_input"));
    expand.set_attribute("n", int64_t{4});
    expand.set_output("residual", calls.at("residual"));
    for (int i = 0; i < 20; ++i) {
      collapse.run(on);
      expand.run(on);
    }
    return calls.bits("residual");
  };
  const cuda_graph::Stream stream(0);
  const std::string expected = bits_after(Context::cpu());
  EXPECT_TRUE(bits_after(Context::cuda(0, stream.get())) == expected);
  EXPECT_TRUE(bits_after(Context::cuda(0, nullptr)) == expected);
}

TEST(CudaStream, TwoStreamsOfTwoThreadsDoNotMeet) {
  EHC_NEEDS_DEVICE();
  std::vector<std::vector<std::string>> expected;
  std::deque<cli::CaseInputs> inputs;
  Context context = Context::cuda(0, nullptr);
  for (const Operator* op : operators_on(Device::cuda)) {
    inputs.emplace_back(*op, first_case(*op));
    expected.push_back(bits_of(cli::run_case(inputs.back(), inputs.back().tensors(), context, {})));
  }
  std::vector<std::string> wrong[2];
  const auto work = [&](std::vector<std::string>& found) {
    const cuda_graph::Stream stream(0);
    Context own = Context::cuda(0, stream.get());
    for (int round = 0; round < 3; ++round) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        const auto result = cli::run_case(inputs[i], inputs[i].tensors(), own, {});
        if (bits_of(result) != expected[i]) found.emplace_back(inputs[i].op().schema.name);
      }
    }
  };
  std::thread other([&] { work(wrong[1]); });
  work(wrong[0]);
  other.join();
  for (const auto& list : wrong) EXPECT_EQ(list, std::vector<std::string>());
}

// A graph holds addresses, not values: its replay reads what lies there then.
TEST(CudaGraph, AReplayReadsTheMemoryOfItsTime) {
  EHC_NEEDS_DEVICE();
  for (const Operator* op : operators_on(Device::cuda)) {
    cli::CaseLine line = first_case(*op);
    const cli::CaseInputs first(*op, line);
    line.set("data", "2");
    const cli::CaseInputs second(*op, line);
    const cuda_graph::Stream stream(0);
    Context context = Context::cuda(0, stream.get());
    const auto expected = bits_of(cli::run_case(second, second.tensors(), context, {}));

    std::deque<Buffer> memory;
    DynamicCall call(*op);
    first.prepare(call);
    for (size_t i = 0; i < first.tensors().size(); ++i) {
      if (!call.spec_of(i).is_output) call.tensor(i) = first.tensors()[i];
    }
    const std::vector<Tensor> made = call.outputs();
    std::vector<Buffer*> homes(made.size(), nullptr);
    for (size_t i = 0; i < made.size(); ++i) {
      const Tensor& like = call.spec_of(i).is_output ? made[i] : first.tensors()[i];
      if (!like.present()) continue;
      homes[i] = &memory.emplace_back(context, bytes_of(like));
      if (!call.spec_of(i).is_output) homes[i]->upload(like.data);
      call.tensor(i) = Tensor(homes[i]->data(), like.dtype, like.shape, like.rank, Device::cuda, 0);
    }
    for (const auto& [output, input] : call.shared_memory()) {
      if (!made[output].present()) continue;
      call.tensor(output) = call.tensor(input);
      homes[output] = homes[input];
    }
    const Buffer workspace(context, call.plan(context).workspace_bytes);
    context.set_workspace(workspace.data(), workspace.bytes());
    const cuda_graph::Graph graph(0, stream.get(), [&] { call.run(context); });
    graph.launch();
    for (size_t i = 0; i < made.size(); ++i) {
      const Tensor& t = second.tensors()[i];
      if (!call.spec_of(i).is_output && t.present()) homes[i]->upload(t.data);
    }
    graph.launch();
    size_t at = 0;
    for (size_t i = 0; i < made.size(); ++i) {
      if (!made[i].present()) continue;
      std::string bits(bytes_of(made[i]), '\0');
      homes[i]->download(bits.data());
      // Outputs with room for more rows than there are: those that there are.
      EXPECT_TRUE(bits.starts_with(expected[at])) << op->schema.name << " " << call.name_of(i);
      ++at;
    }
  }
}

}  // namespace
}  // namespace ehc
