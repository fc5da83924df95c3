//! What this machine can do, for the planner: its memory, and how fast the kernels that will run read weights and
//! multiply. `kernels::probe` measures the limits of the hardware; this measures what the kernels reach.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use half::bf16;
use kernels::cpu::{Buffer, CpuBackend, CpuOptions, DecodeMath, Level, Matrix, PrefillMath};
use kernels::quant::quantise;
use kernels::{Backend, BackendError, MatrixSource, Rows};
use types::DType;

use net::PeerAddress;
use plan::NodeFacts;

/// The widest rows of weights that are measured. The values come from the network.
pub const HIDDEN_MAX: usize = 1 << 15;

/// What a machine was measured to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineFacts {
    pub level: Level,
    pub threads: usize,
    /// Bytes that can still be allocated; `u64::MAX` if the system does not report it.
    pub memory_free: u64,
    pub read_bytes_per_s: f64,
    pub multiply_adds_per_s: f64,
    pub step_seconds: f64,
}

impl MachineFacts {
    pub fn into_node(self, name: String, address: Option<PeerAddress>) -> NodeFacts {
        let Self { level, threads, memory_free, read_bytes_per_s, multiply_adds_per_s, step_seconds } = self;
        NodeFacts { name, address, level, threads, memory_free, read_bytes_per_s, multiply_adds_per_s, step_seconds }
    }
}

/// What is measured: the arithmetic of a model, on rows of its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeSettings {
    pub threads: usize,
    pub level: Level,
    pub decode: DecodeMath,
    pub prompt: PrefillMath,
    /// The format of most of the model's weights.
    pub format: DType,
    pub hidden: usize,
}

impl Default for ProbeSettings {
    fn default() -> Self {
        let CpuOptions { threads, level, decode, prompt, .. } = CpuOptions::default();
        Self { threads, level, decode, prompt, format: DType::Q8_0, hidden: 2048 }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    #[error("rows of {hidden} {format} weights cannot be measured: 1 to {HIDDEN_MAX} that are whole blocks can")]
    Hidden { hidden: usize, format: DType },
    #[error("measure this machine")]
    Backend(#[from] BackendError),
}

/// Measures this machine in a fraction of a second. What else runs on it at that time is part of the result.
pub fn measure_machine(settings: &ProbeSettings) -> Result<MachineFacts, MeasureError> {
    measure_with(settings, &EFFORT)
}

/// How much is read, and for how long at least.
struct Effort {
    /// Weights in memory. More than the last-level caches of most machines hold.
    set_bytes: usize,
    matrix_bytes: usize,
    /// No more weights are packed after this time.
    packing: Duration,
    /// The time for each of the two rates.
    sampling: Duration,
}

const EFFORT: Effort = Effort {
    set_bytes: 256 << 20,
    matrix_bytes: 16 << 20,
    packing: Duration::from_millis(250),
    sampling: Duration::from_millis(100),
};

/// A part of the free memory that weights for measuring may take.
const MEMORY_PART: u64 = 8;
/// The rows of a step in prefill. Fewer are measured where they take long.
const ROWS_MAX: usize = 512;
const ROWS_MIN: usize = 16;
/// Samples of each rate, at least. The median counts.
const SAMPLES_MIN: usize = 5;
const HAND_OFFS: usize = 32;

fn measure_with(settings: &ProbeSettings, effort: &Effort) -> Result<MachineFacts, MeasureError> {
    let ProbeSettings { threads, level, decode, prompt, format, hidden } = *settings;
    if !(1..=HIDDEN_MAX).contains(&hidden) || format.row_bytes(hidden).is_none() {
        return Err(MeasureError::Hidden { hidden, format });
    }
    let memory_free = ranks::memory_available().unwrap_or(u64::MAX);
    let backend = CpuBackend::new(CpuOptions { threads, level, decode, prompt, ..CpuOptions::default() })?;
    let weights = Weights::new(&backend, settings, effort, memory_free)?;
    Ok(MachineFacts {
        level,
        threads: backend.threads(),
        memory_free,
        read_bytes_per_s: weights.read_rate(effort)?,
        multiply_adds_per_s: weights.multiply_rate(effort)?,
        step_seconds: hand_off_seconds(),
    })
}

/// Matrices like those of a model, in memory.
struct Weights<'a> {
    backend: &'a CpuBackend,
    matrices: Vec<Matrix>,
    rows: usize,
    hidden: usize,
}

impl<'a> Weights<'a> {
    fn new(
        backend: &'a CpuBackend,
        settings: &ProbeSettings,
        effort: &Effort,
        memory_free: u64,
    ) -> Result<Self, BackendError> {
        let ProbeSettings { format, hidden, .. } = *settings;
        let bytes = row_of_noise(format, hidden);
        let rows = (4 * hidden).min(effort.matrix_bytes / bytes.len()).max(1);
        // All rows are the same one.
        let source = MatrixSource { dtype: format, rows, cols: hidden, row_stride: 0, bytes: &bytes, keep: format };
        let part = usize::try_from(memory_free / MEMORY_PART).unwrap_or(usize::MAX);
        let count = effort.set_bytes.min(part) / backend.packed_bytes(&[source]).max(1);
        let (start, mut matrices) = (Instant::now(), vec![backend.matrix(&[source])?]);
        while matrices.len() < count && start.elapsed() < effort.packing {
            matrices.push(backend.matrix(&[source])?);
        }
        Ok(Self { backend, matrices, rows, hidden })
    }

    /// Bytes of weights that one decode row reads per second. Each sample reads another matrix.
    fn read_rate(&self, effort: &Effort) -> Result<f64, BackendError> {
        let (mut out, input) = (self.backend.output(1, self.rows)?, self.input(1)?);
        let mut matrices = self.matrices.iter().cycle();
        Ok(median_rate(effort, || {
            let Some(matrix) = matrices.next() else { return 0.0 };
            self.backend.linear(Rows::decode(1), &mut out, &input, matrix, None);
            self.backend.matrix_bytes(matrix) as f64
        }))
    }

    /// Multiply-adds of prefill rows per second.
    fn multiply_rate(&self, effort: &Effort) -> Result<f64, BackendError> {
        let (mut out, input) = (self.backend.output(ROWS_MAX, self.rows)?, self.input(ROWS_MAX)?);
        let matrix = &self.matrices[0];
        let mut multiply = |rows: usize| {
            self.backend.linear(Rows::prefill(rows), &mut out, &input, matrix, None);
            (rows * self.rows * self.hidden) as f64
        };
        let mut rows = ROWS_MIN;
        loop {
            let start = Instant::now();
            multiply(rows);
            if rows == ROWS_MAX || start.elapsed() * 2 * SAMPLES_MIN as u32 > effort.sampling {
                break;
            }
            rows *= 2;
        }
        Ok(median_rate(effort, || multiply(rows)))
    }

    fn input(&self, rows: usize) -> Result<Buffer, BackendError> {
        let mut input = self.backend.buffer(rows, self.hidden)?;
        let values: Vec<f32> = noise().take(rows * self.hidden).collect();
        self.backend.write(&mut input, &values)?;
        Ok(input)
    }
}

/// Calls `work`, which returns how much it did, for the time of the effort. The first call is not counted: it touches memory
/// for the first time, and wakes threads.
fn median_rate(effort: &Effort, mut work: impl FnMut() -> f64) -> f64 {
    work();
    let (start, mut rates) = (Instant::now(), Vec::new());
    while rates.len() < SAMPLES_MIN || start.elapsed() < effort.sampling {
        let begin = Instant::now();
        let amount = work();
        rates.push(amount / begin.elapsed().as_secs_f64().max(1e-9));
    }
    median(rates)
}

/// The time in which a waiting thread gets a message and its answer is received.
fn hand_off_seconds() -> f64 {
    let (request, requests) = mpsc::sync_channel::<()>(0);
    let (reply, replies) = mpsc::sync_channel::<()>(0);
    std::thread::scope(|scope| {
        scope.spawn(move || while requests.recv().is_ok() && reply.send(()).is_ok() {});
        let hand_off = || {
            let start = Instant::now();
            // The thread answers until the sender is dropped.
            let answered = request.send(()).is_ok() && replies.recv().is_ok();
            if answered { start.elapsed().as_secs_f64() } else { 0.0 }
        };
        let times = (0..HAND_OFFS).map(|_| hand_off()).collect();
        drop(request);
        median(times)
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// One row of weights in a format. Their values do not matter, but zeros might be faster.
fn row_of_noise(format: DType, elements: usize) -> Vec<u8> {
    let values: Vec<f32> = noise().take(elements).collect();
    match format {
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        _ => {
            let mut bytes = vec![0; format.row_bytes(elements).unwrap_or(0)];
            quantise(format, &values, &mut bytes);
            bytes
        }
    }
}

/// Pseudo-random numbers between -1 and 1.
fn noise() -> impl Iterator<Item = f32> {
    let next = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(1), next).map(|state| (state >> 8) as f32 / (1 << 23) as f32 - 1.0)
}

#[cfg(test)]
mod tests {
    use testing::needs;

    use super::*;

    const SMALL: Effort = Effort {
        set_bytes: 1 << 20,
        matrix_bytes: 64 << 10,
        packing: Duration::from_millis(20),
        sampling: Duration::from_millis(1),
    };

    #[test]
    fn every_level_and_format_has_rates() {
        for level in needs::levels(Level::ALL, Level::detect()) {
            for format in [DType::Q8_0, DType::Q4_K, DType::BF16, DType::F16, DType::F32] {
                let settings = ProbeSettings { threads: 2, level, format, hidden: 256, ..ProbeSettings::default() };
                let facts = measure_with(&settings, &SMALL).unwrap();
                assert_eq!((facts.level, facts.threads), (level, 2));
                let rates = [facts.read_bytes_per_s, facts.multiply_adds_per_s, facts.step_seconds];
                assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0), "{facts:?}");
            }
        }
    }

    #[test]
    fn measuring_takes_no_more_memory_than_it_may() {
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
        let settings = ProbeSettings { hidden: 256, ..ProbeSettings::default() };
        let effort = Effort { packing: Duration::MAX, ..SMALL };
        let packed = |memory_free| {
            let weights = Weights::new(&backend, &settings, &effort, memory_free).unwrap();
            weights.matrices.iter().map(|matrix| backend.matrix_bytes(matrix)).sum::<usize>()
        };
        let (one, all) = (packed(0), packed(u64::MAX));
        assert!(one <= effort.matrix_bytes * 2, "{one}");
        assert!(all <= effort.set_bytes && all > effort.set_bytes - one, "{all}");
        let part = 4 << 20;
        assert!(packed(part) as u64 <= part / MEMORY_PART);
    }

    #[test]
    fn a_width_that_no_model_has_is_refused() {
        for (hidden, format) in
            [(0, DType::F32), (HIDDEN_MAX + 1, DType::F32), (255, DType::Q4_K), (usize::MAX, DType::Q8_0)]
        {
            let settings = ProbeSettings { hidden, format, ..ProbeSettings::default() };
            let measured = measure_with(&settings, &SMALL);
            assert!(matches!(measured, Err(MeasureError::Hidden { .. })), "{hidden} {format}");
        }
    }
}
