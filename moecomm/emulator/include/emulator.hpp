// Runs CUDA C++ kernels on a CPU: what `common.cuh` includes where there is no CUDA compiler.
//
// Compile a program with MOECOMM_EMULATOR_CHECKS=1 to have every access through the wrappers seen
// by the runtime's checks and faults; without it a wrapper is the plain instruction.
#pragma once

#include "abi.hpp"
#include "device_types.hpp"

#include "device_atomics.hpp"
#include "device_hooks.hpp"
#include "device_math.hpp"
#include "device_memory.hpp"
#include "device_sync.hpp"

#define threadIdx (::emu::self()->thread_idx)
#define blockIdx (::emu::self()->block_idx)
#define blockDim (::emu::self()->block_dim)
#define gridDim (::emu::self()->grid_dim)
#define warpSize 32

#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(::emu::self()->shared)
