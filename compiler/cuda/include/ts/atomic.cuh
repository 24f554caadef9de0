// Atomic updates of global and shared memory, seen by the whole GPU. The value before is the result.
#pragma once
#include <ts/types.cuh>
#ifdef TS_NVSHMEM
#include <ts/nvshmem.cuh>
// What follows only touches memory that is addressed; a word of another rank that is not is the library's.
#define TS_FAR_WORD(then) \
  if (pe_of(at) >= 0) return then;
#else
#define TS_FAR_WORD(then)
#endif

namespace ts {

// An update by comparing and swapping, for what has no instruction. `update` makes the new value of the old.
template <typename T, typename Update>
__device__ __forceinline__ T atomic_by_swap(T* at, Update update) {
  using Word = typename WordOf<sizeof(T)>::type;
  Word* word = reinterpret_cast<Word*>(at);
  Word seen = *reinterpret_cast<volatile Word*>(word);
  while (true) {
    const T before = bits<T>(seen);
    const Word found = atomicCAS(word, seen, bits<Word>(update(before)));
    if (found == seen) return before;
    seen = found;
  }
}

template <typename T>
__device__ __forceinline__ T atomic_add(T* at, T value) {
  if constexpr (sizeof(T) == 2) {  // 16-bit floats: added in float32, rounded once
    return atomic_by_swap(at, [=](T before) { return T(float(before) + float(value)); });
  } else if constexpr (sizeof(T) == 8 && T(1) / T(2) == T(0)) {  // two's complement: signed and unsigned sums are the same bits
    return T(atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(value)));
  } else {
    return atomicAdd(at, value);
  }
}

// Sums of 16-bit floats in one instruction, rounded once (PTX ISA 9.0, "atom").
#define TS_ATOMIC_ADD(kind)                                                                                      \
  template <typename T>                                                                                         \
  __device__ __forceinline__ T atomic_add_##kind(T* at, T value) {                                              \
    unsigned short before;                                                                                      \
    asm volatile("atom.relaxed.gpu.add.noftz." #kind " %0, [%1], %2;"                                           \
                 : "=h"(before) : "l"(at), "h"(bits<unsigned short>(value)) : "memory");                        \
    return bits<T>(before);                                                                                     \
  }
TS_ATOMIC_ADD(f16)
#if __CUDA_ARCH__ >= 900
TS_ATOMIC_ADD(bf16)
#endif
#undef TS_ATOMIC_ADD

template <typename T>
__device__ __forceinline__ T atomic_max(T* at, T value) {
  return atomic_by_swap(at, [=](T before) {
    if constexpr (sizeof(T) == 2) {
      return float(before) >= float(value) || float(before) != float(before) ? before : value;
    } else {
      return before >= value || before != before ? before : value;
    }
  });
}

template <typename T>
__device__ __forceinline__ T atomic_min(T* at, T value) {
  return atomic_by_swap(at, [=](T before) {
    if constexpr (sizeof(T) == 2) {
      return float(before) <= float(value) || float(before) != float(before) ? before : value;
    } else {
      return before <= value || before != before ? before : value;
    }
  });
}

// Of bits: integers of 32 or 64.
#define TS_ATOMIC_WORD(kind, instruction)                                       \
  template <typename T>                                                         \
  __device__ __forceinline__ T atomic_##kind(T* at, T value) {                  \
    using Word = typename WordOf<sizeof(T)>::type;                              \
    return bits<T>(instruction(reinterpret_cast<Word*>(at), bits<Word>(value))); \
  }
TS_ATOMIC_WORD(or, atomicOr)
TS_ATOMIC_WORD(and, atomicAnd)
TS_ATOMIC_WORD(xor, atomicXor)
#undef TS_ATOMIC_WORD

template <typename T>
__device__ __forceinline__ T atomic_exch(T* at, T value) {
  if constexpr (sizeof(T) == 2) {
    return atomic_by_swap(at, [=](T) { return value; });
  } else {
    using Word = typename WordOf<sizeof(T)>::type;
    return bits<T>(atomicExch(reinterpret_cast<Word*>(at), bits<Word>(value)));
  }
}

template <typename T>
__device__ __forceinline__ T atomic_load(T* at, T) {
  using Word = typename WordOf<sizeof(T)>::type;
  Word seen;
  if constexpr (sizeof(T) == 2) {
    asm volatile("ld.acquire.gpu.b16 %0, [%1];" : "=h"(seen) : "l"(at) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
  } else {
    asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  }
  return bits<T>(seen);
}

template <typename T>
__device__ __forceinline__ T atomic_store(T* at, T value) {
  using Word = typename WordOf<sizeof(T)>::type;
  const Word word = bits<Word>(value);
  if constexpr (sizeof(T) == 2) {
    asm volatile("st.release.gpu.b16 [%0], %1;" ::"l"(at), "h"(word) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.release.gpu.b32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
  } else {
    asm volatile("st.release.gpu.b64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
  }
  return value;
}

// The same between two fences: what the block did before the update is seen by whoever updates the element later, and what those did
// before by this block afterwards.
#define TS_PUBLISHING(kind)                                       \
  template <typename T>                                           \
  __device__ __forceinline__ T publishing_##kind(T* at, T value) { \
    __threadfence();                                              \
    const T before = atomic_##kind(at, value);                    \
    __threadfence();                                              \
    return before;                                                \
  }
TS_PUBLISHING(add)
TS_PUBLISHING(add_f16)
#if __CUDA_ARCH__ >= 900
TS_PUBLISHING(add_bf16)
#endif
TS_PUBLISHING(max)
TS_PUBLISHING(min)
TS_PUBLISHING(or)
TS_PUBLISHING(and)
TS_PUBLISHING(xor)
TS_PUBLISHING(exch)
#undef TS_PUBLISHING

// A load that acquires and a store that releases carry as much by themselves: causality order through the block's barriers in front of the
// store and behind the load is cumulative (PTX ISA, "Memory Consistency Model"). A fence of the whole GPU takes a microsecond.
template <typename T>
__device__ __forceinline__ T publishing_load(T* at, T) { return atomic_load(at, T()); }
template <typename T>
__device__ __forceinline__ T publishing_store(T* at, T value) { return atomic_store(at, value); }

// Updates that all ranks see as one, acquiring and releasing at the scope of the system (PTX ISA, "atom", .acq_rel.sys).
template <typename Word>
__device__ __forceinline__ Word system_swap(Word* at, Word seen, Word next) {
  TS_FAR_WORD(far_swap(at, seen, next))
  Word found;
  if constexpr (sizeof(Word) == 2) {
    asm volatile("atom.acq_rel.sys.global.cas.b16 %0, [%1], %2, %3;" : "=h"(found) : "l"(at), "h"(seen), "h"(next) : "memory");
  } else if constexpr (sizeof(Word) == 4) {
    asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;" : "=r"(found) : "l"(at), "r"(seen), "r"(next) : "memory");
  } else {
    asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], %2, %3;" : "=l"(found) : "l"(at), "l"(seen), "l"(next) : "memory");
  }
  return found;
}
template <typename Word>
__device__ __forceinline__ Word system_look(Word* at) {
  TS_FAR_WORD(far_look(at))
  return *reinterpret_cast<volatile Word*>(at);
}
template <typename T, typename Update>
__device__ __forceinline__ T system_by_swap(T* at, Update update) {
  using Word = typename WordOf<sizeof(T)>::type;
  Word* word = reinterpret_cast<Word*>(at);
  Word seen = system_look(word);
  while (true) {
    const T before = bits<T>(seen);
    const Word found = system_swap(word, seen, bits<Word>(update(before)));
    if (found == seen) return before;
    seen = found;
  }
}
template <typename T>
__device__ __forceinline__ T system_add(T* at, T value) {
  if constexpr (sizeof(T) == 2) {
    return system_by_swap(at, [=](T before) { return T(float(before) + float(value)); });
  } else if constexpr (T(1) / T(2) == T(0)) {  // integers of 32 or 64 bits
    TS_FAR_WORD(system_by_swap(at, [=](T before) { return before + value; }))
    using Word = typename WordOf<sizeof(T)>::type;
    Word before;
    if constexpr (sizeof(T) == 4) {
      asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(bits<Word>(value)) : "memory");
    } else {
      asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(bits<Word>(value)) : "memory");
    }
    return bits<T>(before);
  } else {
    return system_by_swap(at, [=](T before) { return before + value; });
  }
}
#ifdef TS_NVSHMEM
template <typename T>
__device__ __forceinline__ auto float_or(T x) {
  if constexpr (sizeof(T) == 2) return float(x);
  else return x;
}
#endif
// A sum that ranks add to in any order, and that nobody is told of by it: relaxed. The scope is the system's, since two updates are atomic to
// each other only where the scope of each takes in the other (PTX ISA, "red"). TMA's sums are relaxed at the scope of a GPU
// ("cp.reduce.async.bulk"), so it makes none of these. What comes before a signal of the block is there for whoever awaits it: the barrier in
// front of the signal orders these behind it as it does plain stores.
template <typename T>
__device__ __forceinline__ void system_red_add(T* at, T value) {
  TS_FAR_WORD((void)system_by_swap(at, [=](T before) { return T(float_or(before) + float_or(value)); }))
  if constexpr (sizeof(T) == 2) {
    system_by_swap(at, [=](T before) { return T(float(before) + float(value)); });
  } else if constexpr (T(1) / T(2) == T(0)) {  // integers of 32 or 64 bits
    using Word = typename WordOf<sizeof(T)>::type;
    if constexpr (sizeof(T) == 4) asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(at), "r"(bits<Word>(value)) : "memory");
    else asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(bits<Word>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
  } else {
    asm volatile("red.relaxed.sys.global.add.f64 [%0], %1;" ::"l"(at), "d"(value) : "memory");
  }
}
#define TS_SYSTEM_RED_ADD(kind)                                                                                                       \
  template <typename T>                                                                                                              \
  __device__ __forceinline__ void system_red_add_##kind(T* at, T value) {                                                            \
    TS_FAR_WORD(system_red_add(at, value))                                                                                           \
    asm volatile("red.relaxed.sys.global.add.noftz." #kind " [%0], %1;" ::"l"(at), "h"(bits<unsigned short>(value)) : "memory");     \
  }
TS_SYSTEM_RED_ADD(f16)
#if __CUDA_ARCH__ >= 900
TS_SYSTEM_RED_ADD(bf16)
#endif
#undef TS_SYSTEM_RED_ADD

#define TS_SYSTEM(kind, better)                                                                                    \
  template <typename T>                                                                                            \
  __device__ __forceinline__ T system_##kind(T* at, T value) {                                                     \
    return system_by_swap(at, [=](T before) {                                                                      \
      if constexpr (sizeof(T) == 2) {                                                                              \
        return float(before) better float(value) || float(before) != float(before) ? before : value;               \
      } else {                                                                                                     \
        return before better value || before != before ? before : value;                                           \
      }                                                                                                            \
    });                                                                                                            \
  }
TS_SYSTEM(max, >=)
TS_SYSTEM(min, <=)
#undef TS_SYSTEM
template <typename T>
__device__ __forceinline__ T system_load(T* at, T) {
  TS_FAR_WORD(system_by_swap(at, [](T before) { return before; }))
  using Word = typename WordOf<sizeof(T)>::type;
  Word seen;
  if constexpr (sizeof(T) == 2) asm volatile("ld.acquire.sys.global.b16 %0, [%1];" : "=h"(seen) : "l"(at) : "memory");
  else if constexpr (sizeof(T) == 4) asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
  else asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
  return bits<T>(seen);
}
template <typename T>
__device__ __forceinline__ T system_store(T* at, T value) {
  TS_FAR_WORD(system_by_swap(at, [=](T) { return value; }))
  using Word = typename WordOf<sizeof(T)>::type;
  const Word word = bits<Word>(value);
  if constexpr (sizeof(T) == 2) asm volatile("st.release.sys.global.b16 [%0], %1;" ::"l"(at), "h"(word) : "memory");
  else if constexpr (sizeof(T) == 4) asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
  else asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
  return value;
}

}  // namespace ts
#undef TS_FAR_WORD
