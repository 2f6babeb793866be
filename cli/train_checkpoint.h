// Everything that a training run needs to go on as if it had never stopped: a safetensors file with
// parameters, momenta and the losses so far; step, settings and a checksum in its metadata.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/train_model.h"

namespace ehc::cli {

// What must be equal for a run to be the same: options, and checksums of the inputs. One level.
using TrainSettings = nlohmann::ordered_json;

// Written atomically. The step is the number of losses.
void save_checkpoint(const std::string& path, const std::vector<Parameter>& parameters,
                     const std::vector<float>& losses, const TrainSettings& settings);

// Fills the parameters and returns the losses. Error{io} for a file that is not a whole, undamaged
// checkpoint, Error{contract} for one of other settings, naming the first that differs; nothing is
// filled then.
std::vector<float> load_checkpoint(const std::string& path, std::vector<Parameter>& parameters,
                                   const TrainSettings& settings);

// XXH64 of all values, momenta and losses.
std::string checksum_of(const std::vector<Parameter>& parameters, const std::vector<float>& losses);

}  // namespace ehc::cli
