// `ehc train`: the Engram layer alone learns to predict the next token of a text.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/memory_limit.h"
#include "cli/output_path.h"
#include "cli/progress.h"
#include "cli/text_inputs.h"
#include "cli/train_checkpoint.h"
#include "cli/train_model.h"
#include "cli/train_text.h"
#include "core/file_io.h"
#include "ehc/error.h"
#include "ehc/version.h"

namespace ehc::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string ids, map, layout, json, checkpoint;
  TrainConfig train;
  int64_t steps = 300;
  int64_t every = 100;
  int64_t text_tokens = 0;
  int64_t layer = -1;
  int64_t paragraph_begin = 0;
  int64_t paragraph_tokens = 160;
  int threads = 0;
  bool restart = false;
};

std::string checksum(const Tensor& tensor) {
  Checksum sum;
  sum.add(tensor);
  return sum.text();
}

std::string checksum(const tables::HashLayout& layout) {
  Checksum sum;
  sum.add(layout.multipliers_tensor());
  sum.add(layout.vocab_sizes_tensor());
  sum.add(layout.offsets_tensor());
  return sum.text();
}

TrainSettings settings_of(const Options& options, const Tensor& ids, const text::TokenMap& map,
                          const tables::HashLayout& layout, size_t layer) {
  const TrainConfig& train = options.train;
  const tables::HashLayoutConfig& config = layout.config();
  return {{"tokens", train.tokens},
          {"lanes", train.lanes},
          {"streams", train.streams},
          {"width", train.width},
          {"classes", train.classes},
          {"table_rate", train.table_rate},
          {"rate", train.rate},
          {"seed", train.seed},
          {"layer", config.layer_ids[layer]},
          {"row_width", config.row_width},
          {"ids", checksum(ids)},
          {"map", checksum(Tensor(map.table().data(), DType::i32, {map.vocab_size()}))},
          {"layout", checksum(layout)}};
}

void require_memory_for(const tables::HashLayout& layout, size_t layer, const TrainConfig& config) {
  const auto number = [](int64_t x) { return static_cast<double>(x); };
  const double row_width = number(layout.config().row_width);
  const double embed = number(layout.config().columns()) * row_width;
  const double n = number(config.streams);
  const double d = number(config.width);
  // Value, momentum, and either the optimizer's copy or a gradient.
  const double parameters = 3 * (number(layout.rows()[layer]) * row_width + (n + 1) * d * embed +
                                 number(config.classes) * d);
  // Forward and backward: embeddings and gradients of rows, kv, streams, features, classes.
  const double token = 3 * embed + 2 * (n + 1) * d + 4 * n * d + 2 * d + number(config.classes);
  const double wanted = sizeof(float) * (parameters + number(config.tokens) * token);
  require_memory(wanted, "table, weights and one step", "a smaller layout, --width or --tokens");
}

Json rows_of(const Tensor& alpha) {
  const auto* values = alpha.as<float>();
  Json rows = Json::array();
  for (int64_t t = 0; t < alpha.shape[0]; ++t) {
    rows.push_back(std::vector<float>(values, values + alpha.shape[1]));
    values += alpha.shape[1];
  }
  return rows;
}

double mean_of(const std::vector<float>& values, size_t count) {
  return std::accumulate(values.end() - static_cast<std::ptrdiff_t>(count), values.end(), 0.0) /
         static_cast<double>(count);
}

// Steps whose mean loss is reported as that of the whole run.
constexpr size_t kLastSteps = 50;

// Learns until there is a loss for every step.
void take_steps(const Options& options, const TrainSettings& settings, TrainText& text,
                TrainModel& model, std::vector<float>& losses) {
  const auto steps = static_cast<size_t>(options.steps);
  Progress progress("training", steps);
  while (losses.size() < steps) {
    const Batch& batch = text.batch_of(static_cast<int64_t>(losses.size()));
    const double loss = model.forward(batch);
    if (!std::isfinite(loss)) {
      throw Error(ErrorKind::contract,
                  fmt::format("step {}: the loss is {}; take smaller rates", losses.size(), loss));
    }
    model.learn(batch);
    losses.push_back(static_cast<float>(loss));
    progress.show(losses.size(), fmt::format("loss {:.4f}", loss));
    const bool is_last = losses.size() == steps;
    if (!options.checkpoint.empty() &&
        (is_last || losses.size() % static_cast<size_t>(options.every) == 0)) {
      save_checkpoint(options.checkpoint, model.parameters(), losses, settings);
    }
  }
}

// Losses of the same steps when the frequencies of the classes are all that is known.
std::vector<float> unigram_losses(TrainText& text, size_t steps) {
  std::vector<float> losses;
  for (size_t step = 0; step < steps; ++step) {
    losses.push_back(
        static_cast<float>(text.unigram_loss(text.batch_of(static_cast<int64_t>(step)))));
  }
  return losses;
}

Json run_training(const Options& options) {
  const text::TokenMap map = text::TokenMap::load(options.map);
  const tables::HashLayout layout = tables::HashLayout::load(options.layout);
  const tables::NpyArray file = tables::read_npy(options.ids);
  const Tensor ids = usable_ids(file, options.ids, options.text_tokens);
  const size_t layer = find_layer(layout, options.layout, options.layer);
  require_fitting(map, options.map, layout, options.layout);
  require_memory_for(layout, layer, options.train);

  Context context = Context::cpu(options.threads);
  const TrainConfig& config = options.train;
  TrainText text(context, ids, map, layout.config().max_ngram(), config.classes, config.tokens,
                 config.lanes);
  TrainModel model(context, map, layout, layer, config, text.log_frequency());
  const TrainSettings settings = settings_of(options, ids, map, layout, layer);

  const int64_t first = std::min(options.paragraph_begin, text.size() - 1);
  const int64_t count =
      std::min({options.paragraph_tokens, config.tokens, text.size() - 1 - first});
  const auto gates = [&] {
    if (count == 0) return Json::array();
    model.forward(text.tokens_from(first, count));
    return rows_of(model.alpha());
  };
  const Json gates_before = gates();

  std::vector<float> losses;
  std::error_code unused;  // a path that cannot be looked at cannot be written either
  if (!options.checkpoint.empty() && !options.restart &&
      std::filesystem::exists(options.checkpoint, unused)) {
    losses = load_checkpoint(options.checkpoint, model.parameters(), settings);
  }
  const size_t resumed = losses.size();
  const auto start = std::chrono::steady_clock::now();
  take_steps(options, settings, text, model, losses);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const std::vector<float> unigram = unigram_losses(text, losses.size());
  const size_t last = std::min(kLastSteps, losses.size());
  const double done = static_cast<double>(losses.size() - resumed);
  Json json;
  json["version"] = EHC_VERSION_STRING;
  json["settings"] = settings;
  json["configuration"] = {{"text_tokens", text.size()},
                           {"threads", context.executor().concurrency()},
                           {"rows", layout.rows()[layer]},
                           {"row_width", layout.config().row_width},
                           {"rows_per_token", layout.config().columns()},
                           {"steps_per_pass", text.steps_per_pass()}};
  json["steps"] = losses.size();
  json["resumed_at"] = resumed;
  json["seconds"] = seconds;
  json["tokens_per_second"] =
      seconds > 0 ? done * static_cast<double>(config.tokens) / seconds : 0.0;
  json["losses"] = losses;
  json["unigram_losses"] = unigram;
  json["last"] = {
      {"steps", last}, {"loss", mean_of(losses, last)}, {"unigram_loss", mean_of(unigram, last)}};
  json["checksum"] = checksum_of(model.parameters(), losses);
  json["gate"] = {{"first_token", first}, {"before", gates_before}, {"after", gates()}};
  return json;
}

void run(const Options& options) {
  const TrainConfig& config = options.train;
  if (config.tokens % config.lanes != 0) {
    throw UsageError(fmt::format("--lanes: expected a divisor of the {} tokens of a step, got {}",
                                 config.tokens, config.lanes));
  }
  if (config.classes % 2 != 0) {
    throw UsageError(fmt::format("--classes: expected an even number, got {}", config.classes));
  }
  for (const std::string& path : {options.json, options.checkpoint}) {
    if (!path.empty()) require_writable(path);
  }
  const Json json = run_training(options);
  if (!options.json.empty()) {
    const std::string text = json.dump(1) + "\n";
    const std::string_view parts[] = {text};
    write_file(options.json, parts);
  }
  const Json& last = json["last"];
  fmt::print("steps {} ({} now, {:.1f} s, {:.0f} tokens/s)\n", json["steps"].get<size_t>(),
             json["steps"].get<size_t>() - json["resumed_at"].get<size_t>(),
             json["seconds"].get<double>(), json["tokens_per_second"].get<double>());
  fmt::print("loss {:.4f} over the last {} steps; by frequencies alone {:.4f}\n",
             last["loss"].get<double>(), last["steps"].get<size_t>(),
             last["unigram_loss"].get<double>());
  fmt::print("state {}\n", json["checksum"].get<std::string>());
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "train",
      "Train one Engram layer on a text's ids, to predict the next token from the memory alone");
  command->add_option("--ids", o->ids, "raw token ids, .npy, I32 or I64[T]")->required();
  command->add_option("--map", o->map, "token map (ehc tokmap build)")->required();
  command->add_option("--layout", o->layout, "hash layout (ehc layout)")->required();
  command->add_option("--json", o->json, "file to write losses and gates to");
  command->add_option("--checkpoint", o->checkpoint,
                      "file to keep the state in; a run goes on where it stopped");
  command->add_option("--every", o->every, "steps between two checkpoints")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--restart", o->restart, "do not read the checkpoint, replace it");
  command->add_option("--steps", o->steps, "steps in all")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--tokens", o->train.tokens, "tokens of a step")
      ->check(CLI::Range(1, 1 << 18))
      ->capture_default_str();
  command->add_option("--lanes", o->train.lanes, "places of the text that a step reads at")
      ->check(CLI::Range(1, 1 << 12))
      ->capture_default_str();
  command->add_option("--text-tokens", o->text_tokens, "read only this many tokens (default: all)")
      ->check(CLI::PositiveNumber);
  command->add_option("--layer", o->layer, "layer id of the layout (default: its first)");
  command->add_option("--streams", o->train.streams, "residual streams")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  command->add_option("--width", o->train.width, "values per stream")
      ->check(CLI::Range(1, 1 << 14))
      ->capture_default_str();
  command
      ->add_option("--classes", o->train.classes,
                   "classes of the next token: its most frequent ids and one for all others")
      ->check(CLI::Range(2, 1 << 16))
      ->capture_default_str();
  command->add_option("--table-rate", o->train.table_rate, "learning rate of the table")
      ->check(CLI::Range(0.0, 1e3))
      ->capture_default_str();
  command->add_option("--rate", o->train.rate, "learning rate of everything else")
      ->check(CLI::Range(0.0, 1e3))
      ->capture_default_str();
  command->add_option("--seed", o->train.seed, "of parameters and incoming streams")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--paragraph-begin", o->paragraph_begin, "first token whose gates are listed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--paragraph-tokens", o->paragraph_tokens, "how many, at most those of a step")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--threads", o->threads, "0: all cores")
      ->envname("EHC_THREADS")
      ->check(CLI::NonNegativeNumber);
  command->callback([o] { run(*o); });
}

}  // namespace ehc::cli
