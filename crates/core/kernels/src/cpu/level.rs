//! The instruction set that the kernels may use: detected once at run time, or set lower so that tests cover every variant.

use std::fmt;
use std::str::FromStr;

/// Instruction sets, each including the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust: any CPU.
    Scalar,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// AMX int8 and bf16 tiles, granted to this process by the kernel.
    Amx,
}

impl Level {
    /// Lowest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Amx];

    /// The best level that this CPU and operating system support.
    pub fn detect() -> Self {
        static DETECTED: std::sync::OnceLock<Level> = std::sync::OnceLock::new();
        *DETECTED.get_or_init(detect)
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, thiserror::Error)]
#[error("unknown CPU level {0:?}: use scalar, avx2, avx512 or amx")]
pub struct UnknownLevel(String);

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(name: &str) -> Result<Self, UnknownLevel> {
        Self::ALL.into_iter().find(|level| level.name() == name).ok_or_else(|| UnknownLevel(name.to_owned()))
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Scalar
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    use std::arch::is_x86_feature_detected as has;
    if !(has!("avx2") && has!("fma") && has!("f16c")) {
        return Level::Scalar;
    }
    let avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") && has!("avx512vnni");
    if !avx512 {
        return Level::Avx2;
    }
    if amx_granted() { Level::Amx } else { Level::Avx512 }
}

/// Whether the CPU has int8 and bf16 tiles and Linux lets this process use them.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_granted() -> bool {
    use std::arch::x86_64::__cpuid_count;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // CPUID leaf 7, EDX: bit 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8.
    let required_bits = 1 << 22 | 1 << 24 | 1 << 25;
    if __cpuid_count(0, 0).eax < 7 || __cpuid_count(7, 0).edx & required_bits != required_bits {
        return false;
    }
    // SAFETY: `arch_prctl` with this code reads no memory; it asks for permission and returns 0 or an error.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_granted() -> bool {
    false
}
