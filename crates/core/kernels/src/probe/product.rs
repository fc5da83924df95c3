//! The arithmetic that the kernels of this build reach, beside the peak of the instructions that they use. A kernel whose small
//! functions are not inlined reaches a tenth of it: that is a fault of the build, and no model is needed to see it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use types::DType;

use super::Rate;
use crate::cpu::{CpuBackend, CpuOptions, Level, PrefillMath};
use crate::{Backend, BackendError, MatrixSource, Rows};

/// A matrix of 8-bit weights that fits into a second-level cache, and enough rows that arithmetic is the limit.
const OUTPUTS: usize = 256;
const INPUTS: usize = 512;
const ROWS: usize = 64;
/// Short and many, so that some are undisturbed on a busy machine.
const SAMPLE_TIME: Duration = Duration::from_millis(1);
const SAMPLES: usize = 50;

/// Operations per second of one thread that multiplies 8-bit weights with rows of 8-bit activations.
pub fn int8_product(level: Level) -> Result<Rate, BackendError> {
    product(level, SAMPLE_TIME, SAMPLES)
}

pub(super) fn product(level: Level, sample_time: Duration, samples: usize) -> Result<Rate, BackendError> {
    let options = CpuOptions { threads: 1, level, prompt: PrefillMath::Int8, ..CpuOptions::default() };
    let backend = CpuBackend::new(options)?;
    let bytes = vec![1u8; OUTPUTS * INPUTS / DType::Q8_0.block_elements() * DType::Q8_0.block_bytes()];
    let row_stride = bytes.len() / OUTPUTS;
    let weights =
        MatrixSource { dtype: DType::Q8_0, rows: OUTPUTS, cols: INPUTS, row_stride, bytes: &bytes, keep: DType::Q8_0 };
    let matrix = backend.matrix(&[weights])?;
    let mut x = backend.buffer(ROWS, INPUTS)?;
    backend.write(&mut x, &vec![1.0; ROWS * INPUTS])?;
    let mut out = backend.buffer(ROWS, OUTPUTS)?;

    let operations = (2 * ROWS * OUTPUTS * INPUTS) as f64;
    let rates = (0..samples).map(|_| {
        let (start, mut products) = (Instant::now(), 0);
        while products == 0 || start.elapsed() < sample_time {
            backend.linear(Rows::prefill(ROWS), &mut out, &x, black_box(&matrix), None);
            products += 1;
        }
        operations * f64::from(products) / start.elapsed().as_secs_f64()
    });
    Ok(Rate::of(rates.collect()))
}
