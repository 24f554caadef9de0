// sm_90: launches that begin before the one in front of them on their stream has ended (PTX ISA, "griddepcontrol").
#pragma once

namespace ts {

// Until the launches in front are complete and all that they wrote is visible; global memory is touched behind this alone.
__device__ __forceinline__ void await_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The launch behind may begin when all blocks of this one have said so, or have ended.
__device__ __forceinline__ void admit_launches() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ts
