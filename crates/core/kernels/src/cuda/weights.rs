//! Converts weights of any format to bf16 and uploads them, a bounded number of rows at a time.

use half::bf16;
use types::DType;

use super::CudaMatrix;
use super::device::Device;
use crate::{BackendError, MatrixSource, quant};

/// Elements converted on the host before they are copied.
const STAGED_ELEMENTS: usize = 4 << 20;

pub fn pack(device: &Device, parts: &[MatrixSource<'_>]) -> Result<CudaMatrix, BackendError> {
    let cols = parts.first().map_or(0, |part| part.cols);
    let rows = parts.iter().map(|part| part.rows).sum::<usize>();
    assert!(parts.iter().all(|part| part.cols == cols), "stacked parts have the same columns");
    for part in parts {
        part.check()?;
        if part.keep.is_quantised() && part.keep != part.dtype {
            let reason = format!("weights cannot be quantised to {} on a CUDA device yet", part.keep);
            return Err(BackendError::Device(reason));
        }
    }
    let memory = device.allocate("weights", 2 * rows * cols)?;
    let mut wide = vec![0f32; cols];
    let mut staged = Vec::<u16>::with_capacity(STAGED_ELEMENTS.max(cols).min(rows * cols));
    let mut sent = 0;
    for part in parts {
        for row in 0..part.rows {
            if staged.len() + cols > staged.capacity() {
                device.upload(&memory, sent, &staged)?;
                sent += staged.len();
                staged.clear();
            }
            narrow(part.dtype, part.row(row), &mut wide, &mut staged);
        }
    }
    device.upload(&memory, sent, &staged)?;
    Ok(CudaMatrix { memory, rows, cols })
}

fn narrow(dtype: DType, bytes: &[u8], wide: &mut [f32], out: &mut Vec<u16>) {
    if dtype == DType::BF16 {
        return out.extend(bytes.as_chunks().0.iter().map(|&pair| u16::from_le_bytes(pair)));
    }
    quant::dequantise(dtype, bytes, wide);
    out.extend(wide.iter().map(|&value| bf16::from_f32(value).to_bits()));
}
