//! Measures the limits of this machine: memory read bandwidth and peak arithmetic, in a fraction of a second each.
//! Benchmark results are compared with these limits; no model code uses them.

mod product;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::cpu::Level;

pub use product::int8_product;

/// The rates of several short samples, in units per second. The best is the limit, because disturbances only slow a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub best: f64,
    pub median: f64,
}

/// Bytes per second that `threads` threads together read from a buffer far larger than any cache.
pub fn read_bandwidth(threads: usize) -> Rate {
    bandwidth(threads, SET_BYTES, 6 * PIECES)
}

/// Operations (a multiplication and an addition are two) per second on 8-bit integers with 32-bit sums.
pub fn int8_peak(threads: usize, level: Level) -> Rate {
    peak(threads, int8_loop(level), SAMPLE_TIME, SAMPLES)
}

/// Operations per second on bf16 numbers with f32 sums. Below [`Level::Amx`] they are widened and multiplied as f32, because
/// the bf16 instruction of AVX-512 is slower.
pub fn bf16_peak(threads: usize, level: Level) -> Rate {
    peak(threads, bf16_loop(level), SAMPLE_TIME, SAMPLES)
}

/// Operations per second on f32 numbers.
pub fn f32_peak(threads: usize, level: Level) -> Rate {
    peak(threads, f32_loop(level), SAMPLE_TIME, SAMPLES)
}

/// Several times the size of common last-level caches.
const SET_BYTES: usize = 768 << 20;
const SAMPLES: usize = 12;
const SAMPLE_TIME: Duration = Duration::from_millis(12);

impl Rate {
    fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self {
            best: samples.last().copied().unwrap_or(0.0),
            median: samples.get(samples.len() / 2).copied().unwrap_or(0.0),
        }
    }
}

/// Runs `work` on every thread at once, `samples` times. Returns for each sample the seconds from its start until its last
/// thread finished. `work` gets the state that `prepare` returned on its thread, and the index of the sample.
fn timed<S>(
    threads: usize,
    samples: usize,
    prepare: impl Fn() -> S + Sync,
    work: impl Fn(&S, usize) + Sync,
) -> Vec<f64> {
    let gate = Barrier::new(threads);
    let run = |watch: bool| {
        let state = prepare();
        let mut seconds = Vec::new();
        for sample in 0..samples {
            gate.wait();
            let start = Instant::now();
            work(&state, sample);
            gate.wait();
            if watch {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        seconds
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| run(false));
        }
        run(true)
    })
}

/// A cache line.
type Line = [u64; 8];

fn bandwidth(threads: usize, set_bytes: usize, samples: usize) -> Rate {
    let threads = threads.max(1);
    let piece = (set_bytes / size_of::<Line>() / threads / PIECES).next_multiple_of(STREAMS_MAX);
    // Each thread writes its part first, so that it is resident, and on the thread's NUMA node.
    let prepare = || (0..(piece * PIECES) as u64).map(|i| [i; 8]).collect::<Vec<Line>>();
    let seconds = timed(threads, samples, prepare, |part, sample| {
        let lines = &part[sample % PIECES * piece..][..piece];
        // Which number of streams is fastest depends on the machine.
        black_box(match sample / PIECES % 3 {
            0 => read::<4>(lines),
            1 => read::<STREAMS_MAX>(lines),
            _ => read::<1>(lines),
        });
    });
    let bytes = (piece * size_of::<Line>() * threads) as f64;
    Rate::of(seconds.into_iter().map(|s| bytes / s).collect())
}

/// Each sample reads the next piece of the buffer. Samples are short so that some are undisturbed on a busy machine, and a
/// piece has been evicted from every cache before it is read again.
const PIECES: usize = 8;

/// A core keeps more cache misses in flight when it reads several distant streams.
const STREAMS_MAX: usize = 8;

fn read<const STREAMS: usize>(lines: &[Line]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if Level::detect() >= Level::Avx2 {
        // SAFETY: this level has AVX2.
        return unsafe { read_avx2::<STREAMS>(lines) };
    }
    read_lines::<STREAMS>(lines)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2<const STREAMS: usize>(lines: &[Line]) -> u64 {
    read_lines::<STREAMS>(lines)
}

#[inline(always)]
fn read_lines<const STREAMS: usize>(lines: &[Line]) -> u64 {
    let length = lines.len() / STREAMS;
    let streams: [&[Line]; STREAMS] = std::array::from_fn(|s| &lines[s * length..][..length]);
    let mut sums = [[0u64; 8]; STREAMS];
    for i in 0..length {
        for (sum, stream) in sums.iter_mut().zip(&streams) {
            for (lane, value) in sum.iter_mut().zip(&stream[i]) {
                *lane ^= value;
            }
        }
    }
    sums.iter().flatten().fold(0, |all, lane| all ^ lane)
}

/// A loop that stays in registers, and the number of operations per iteration.
#[derive(Clone, Copy)]
struct Loop {
    turn: fn(usize),
    operations: f64,
}

fn peak(threads: usize, work: Loop, sample_time: Duration, samples: usize) -> Rate {
    let threads = threads.max(1);
    let mut turns = 1024;
    loop {
        let start = Instant::now();
        (work.turn)(turns);
        if start.elapsed() >= sample_time / 2 {
            break;
        }
        turns *= 2;
    }
    let seconds = timed(threads, samples, || (), |(), _| (work.turn)(turns));
    let operations = work.operations * (turns * threads) as f64;
    Rate::of(seconds.into_iter().map(|s| operations / s).collect())
}

/// Portable loops in plain Rust, compiled for any CPU.
mod plain {
    use super::{Loop, black_box};

    const LANES: usize = 32;
    pub const INT8: Loop = Loop { turn: int8, operations: 2.0 * LANES as f64 };
    pub const F32: Loop = Loop { turn: f32, operations: 2.0 * LANES as f64 };

    fn int8(turns: usize) {
        let (factor, mut sums) = (i32::from(black_box(3i8)), [1i32; LANES]);
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = sum.wrapping_mul(factor).wrapping_add(factor);
            }
        }
        black_box(sums);
    }

    fn f32(turns: usize) {
        let (factor, mut sums) = (black_box(0.5f32), [1f32; LANES]);
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = *sum * factor + factor;
            }
        }
        black_box(sums);
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn int8_loop(_: Level) -> Loop {
    plain::INT8
}

#[cfg(not(target_arch = "x86_64"))]
fn bf16_loop(_: Level) -> Loop {
    plain::F32
}

#[cfg(not(target_arch = "x86_64"))]
fn f32_loop(_: Level) -> Loop {
    plain::F32
}

#[cfg(target_arch = "x86_64")]
fn int8_loop(level: Level) -> Loop {
    match level.min(Level::detect()) {
        Level::Scalar => plain::INT8,
        Level::Avx2 => x86::AVX2_INT8,
        Level::Avx512 => x86::AVX512_INT8,
        Level::Amx => x86::AMX_INT8,
    }
}

#[cfg(target_arch = "x86_64")]
fn bf16_loop(level: Level) -> Loop {
    match level.min(Level::detect()) {
        Level::Amx => x86::AMX_BF16,
        lower => f32_loop(lower),
    }
}

#[cfg(target_arch = "x86_64")]
fn f32_loop(level: Level) -> Loop {
    match level.min(Level::detect()) {
        Level::Scalar => plain::F32,
        Level::Avx2 => x86::AVX2_F32,
        Level::Avx512 | Level::Amx => x86::AVX512_F32,
    }
}

/// Loops of one instruction on enough independent sums to hide its latency. The functions above choose them only if the CPU
/// has the instructions.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    use super::Loop;

    pub const AVX2_INT8: Loop = Loop { turn: avx2_int8, operations: 5.0 * 2.0 * 32.0 };
    pub const AVX2_F32: Loop = Loop { turn: avx2_f32, operations: 12.0 * 2.0 * 8.0 };
    pub const AVX512_INT8: Loop = Loop { turn: avx512_int8, operations: 12.0 * 2.0 * 64.0 };
    pub const AVX512_F32: Loop = Loop { turn: avx512_f32, operations: 12.0 * 2.0 * 16.0 };
    pub const AMX_INT8: Loop = Loop { turn: amx_int8, operations: 4.0 * 2.0 * 16.0 * 16.0 * 64.0 };
    pub const AMX_BF16: Loop = Loop { turn: amx_bf16, operations: 4.0 * 2.0 * 16.0 * 16.0 * 32.0 };

    /// Repeats the instructions `turns` times. Vector registers 0 to 15 start at zero, including 15, which is also an
    /// operand.
    macro_rules! vector_loop {
        ($turns:ident, $($instruction:literal),+) => {
            // SAFETY: the loop touches vector registers that are declared as clobbered, and no memory. The functions
            // that choose it checked that the CPU has its instructions.
            unsafe {
                asm!(
                    "vzeroall",
                    "2:",
                    $($instruction,)+
                    "dec {turns}",
                    "jnz 2b",
                    "vzeroupper",
                    turns = inout(reg) $turns.max(1) => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nomem, nostack),
                );
            }
        };
    }

    fn avx2_f32(turns: usize) {
        vector_loop!(
            turns,
            "vfmadd231ps ymm0, ymm15, ymm15",
            "vfmadd231ps ymm1, ymm15, ymm15",
            "vfmadd231ps ymm2, ymm15, ymm15",
            "vfmadd231ps ymm3, ymm15, ymm15",
            "vfmadd231ps ymm4, ymm15, ymm15",
            "vfmadd231ps ymm5, ymm15, ymm15",
            "vfmadd231ps ymm6, ymm15, ymm15",
            "vfmadd231ps ymm7, ymm15, ymm15",
            "vfmadd231ps ymm8, ymm15, ymm15",
            "vfmadd231ps ymm9, ymm15, ymm15",
            "vfmadd231ps ymm10, ymm15, ymm15",
            "vfmadd231ps ymm11, ymm15, ymm15"
        );
    }

    /// A dot product without VNNI: bytes to pairs, pairs to quads, quads to the sum.
    fn avx2_int8(turns: usize) {
        vector_loop!(
            turns,
            "vpmaddubsw ymm8, ymm15, ymm15",
            "vpmaddubsw ymm9, ymm15, ymm15",
            "vpmaddubsw ymm10, ymm15, ymm15",
            "vpmaddubsw ymm11, ymm15, ymm15",
            "vpmaddubsw ymm12, ymm15, ymm15",
            "vpmaddwd ymm8, ymm8, ymm14",
            "vpmaddwd ymm9, ymm9, ymm14",
            "vpmaddwd ymm10, ymm10, ymm14",
            "vpmaddwd ymm11, ymm11, ymm14",
            "vpmaddwd ymm12, ymm12, ymm14",
            "vpaddd ymm0, ymm0, ymm8",
            "vpaddd ymm1, ymm1, ymm9",
            "vpaddd ymm2, ymm2, ymm10",
            "vpaddd ymm3, ymm3, ymm11",
            "vpaddd ymm4, ymm4, ymm12"
        );
    }

    fn avx512_f32(turns: usize) {
        vector_loop!(
            turns,
            "vfmadd231ps zmm0, zmm15, zmm15",
            "vfmadd231ps zmm1, zmm15, zmm15",
            "vfmadd231ps zmm2, zmm15, zmm15",
            "vfmadd231ps zmm3, zmm15, zmm15",
            "vfmadd231ps zmm4, zmm15, zmm15",
            "vfmadd231ps zmm5, zmm15, zmm15",
            "vfmadd231ps zmm6, zmm15, zmm15",
            "vfmadd231ps zmm7, zmm15, zmm15",
            "vfmadd231ps zmm8, zmm15, zmm15",
            "vfmadd231ps zmm9, zmm15, zmm15",
            "vfmadd231ps zmm10, zmm15, zmm15",
            "vfmadd231ps zmm11, zmm15, zmm15"
        );
    }

    fn avx512_int8(turns: usize) {
        vector_loop!(
            turns,
            "vpdpbusd zmm0, zmm15, zmm15",
            "vpdpbusd zmm1, zmm15, zmm15",
            "vpdpbusd zmm2, zmm15, zmm15",
            "vpdpbusd zmm3, zmm15, zmm15",
            "vpdpbusd zmm4, zmm15, zmm15",
            "vpdpbusd zmm5, zmm15, zmm15",
            "vpdpbusd zmm6, zmm15, zmm15",
            "vpdpbusd zmm7, zmm15, zmm15",
            "vpdpbusd zmm8, zmm15, zmm15",
            "vpdpbusd zmm9, zmm15, zmm15",
            "vpdpbusd zmm10, zmm15, zmm15",
            "vpdpbusd zmm11, zmm15, zmm15"
        );
    }

    /// Eight tiles of 16 rows of 64 bytes each.
    #[repr(C, align(64))]
    struct TileConfig {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static TILES: TileConfig = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// Two by two tiles of sums, as in a matrix product. Configured tiles start at zero.
    macro_rules! tile_loop {
        ($turns:ident, $instruction:literal) => {
            // SAFETY: `TILES` is a valid configuration, tiles are declared as clobbered and released at the end. The
            // functions that choose this loop checked that CPU and kernel allow tiles.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    "2:",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    concat!($instruction, " tmm1, tmm4, tmm7"),
                    concat!($instruction, " tmm2, tmm5, tmm6"),
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    "dec {turns}",
                    "jnz 2b",
                    "tilerelease",
                    config = in(reg) &raw const TILES,
                    turns = inout(reg) $turns.max(1) => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(readonly, nostack),
                );
            }
        };
    }

    fn amx_int8(turns: usize) {
        tile_loop!(turns, "tdpbssd");
    }

    fn amx_bf16(turns: usize) {
        tile_loop!(turns, "tdpbf16ps");
    }
}

#[cfg(test)]
mod tests {
    use testing::needs;

    use super::*;

    fn check(name: &str, level: Level, rate: Rate) {
        assert!(rate.median.is_finite() && rate.median > 0.0, "{name} at {level}: {rate:?}");
        assert!(rate.best >= rate.median, "{name} at {level}: {rate:?}");
    }

    #[test]
    fn every_level_that_runs_here_has_its_peaks() {
        let short = Duration::from_micros(200);
        for level in needs::levels(Level::ALL, Level::detect()) {
            check("int8", level, peak(2, int8_loop(level), short, 3));
            check("bf16", level, peak(2, bf16_loop(level), short, 3));
            check("f32", level, peak(2, f32_loop(level), short, 3));
            check("int8 product", level, product::product(level, short, 3).expect("this level runs here"));
        }
    }

    #[test]
    fn reading_with_any_number_of_streams_sees_every_line_once() {
        let lines: Vec<Line> = (0..64).map(|i| [1 << i, 0, 0, 0, 0, 0, 0, 0]).collect();
        assert_eq!(read::<1>(&lines), u64::MAX);
        assert_eq!(read::<4>(&lines), u64::MAX);
        assert_eq!(read::<STREAMS_MAX>(&lines), u64::MAX);
    }

    #[test]
    fn bandwidth_is_measured_with_more_threads_than_lines_divide_evenly_by() {
        check("read", Level::detect(), bandwidth(3, 1 << 20, 3));
    }

    #[test]
    fn the_median_of_an_even_number_of_samples_is_never_above_the_best() {
        assert_eq!(Rate::of(vec![3.0, 1.0, 4.0, 2.0]), Rate { best: 4.0, median: 3.0 });
        assert_eq!(Rate::of(vec![5.0]), Rate { best: 5.0, median: 5.0 });
    }
}
