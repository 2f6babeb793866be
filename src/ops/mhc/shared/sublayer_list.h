// The implementations of an operator around a sublayer.
#pragma once

#include "ops/mhc/shared/device_kernels.h"

namespace ehc::mhc {

template <template <class> class Work>
inline constexpr Implementation kSublayerImplementations[] = {
#if EHC_HAS_CUDA
    {"cuda", Device::cuda, nullptr, &run_sublayer_on_device<Work>, &device_workspace<Work>},
#endif
#if EHC_HAS_AMX
    {"cpu.amx", Device::cpu, &refuse_amx, &run_sublayer<Work, kSublayer_amx>,
     &sublayer_workspace<Work, kSublayer_amx>},
#endif
#define EHC_LIST(isa)                                                                             \
  {"cpu." #isa, Device::cpu, &refuse_missing_isa<Isa::isa>, &run_sublayer<Work, kSublayer_##isa>, \
   &sublayer_workspace<Work, kSublayer_##isa>},
    EHC_EACH_ISA(EHC_LIST)
#undef EHC_LIST
        {"reference", Device::cpu, nullptr, &run_sublayer<Work, kSublayerReference<double>>,
         &sublayer_workspace<Work, kSublayerReference<double>>},
    {"reference.f32", Device::cpu, nullptr, &run_sublayer<Work, kSublayerReference<float>>,
     &sublayer_workspace<Work, kSublayerReference<float>>},
};

}  // namespace ehc::mhc
