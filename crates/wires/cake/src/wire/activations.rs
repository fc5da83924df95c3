//! Activations `[rows, hidden]` of f32 as tensors, and back.

use half::{bf16, f16};

use super::CakeWireError;
use super::tensor::{CakeDType, CakeTensor};

/// The activations of a tensor `[1, rows, hidden]`. All are finite: others would remain in the KV cache.
pub fn activation_rows(tensor: &CakeTensor<'_>, hidden: usize) -> Result<Vec<f32>, CakeWireError> {
    if !matches!(*tensor.shape(), [1, rows, width] if rows > 0 && width == hidden as u64) {
        return Err(CakeWireError::ActivationShape { hidden, shape: tensor.shape().to_vec() });
    }
    let values: Vec<f32> = match tensor.dtype() {
        CakeDType::F32 => elements(tensor.data(), f32::from_le_bytes),
        CakeDType::F16 => elements(tensor.data(), |bytes| f16::from_le_bytes(bytes).to_f32()),
        CakeDType::Bf16 => elements(tensor.data(), |bytes| bf16::from_le_bytes(bytes).to_f32()),
        other => return Err(CakeWireError::ActivationDType(other)),
    };
    if values.iter().all(|value| value.is_finite()) {
        Ok(values)
    } else {
        Err(CakeWireError::NotFinite(tensor.dtype()))
    }
}

/// Gives `send` the tensor `[1, rows, hidden]` of activations, rounded to `dtype`. All have to be finite, also after that.
pub fn activation_tensor<T>(
    values: &[f32],
    hidden: usize,
    dtype: CakeDType,
    send: impl FnOnce(CakeTensor<'_>) -> T,
) -> Result<T, CakeWireError> {
    let is_finite = match dtype {
        CakeDType::F32 => values.iter().all(|value| value.is_finite()),
        CakeDType::F16 => values.iter().all(|&value| f16::from_f32(value).is_finite()),
        CakeDType::Bf16 => values.iter().all(|&value| bf16::from_f32(value).is_finite()),
        other => return Err(CakeWireError::ActivationDType(other)),
    };
    if !is_finite {
        return Err(CakeWireError::NotFinite(dtype));
    }
    let data: Vec<u8> = match dtype {
        CakeDType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        CakeDType::Bf16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    };
    let rows = values.len() / hidden.max(1);
    CakeTensor::new(&data, dtype, vec![1, rows as u64, hidden as u64]).map(send)
}

fn elements<const N: usize>(data: &[u8], element: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    let (elements, _) = data.as_chunks::<N>();
    elements.iter().map(|&bytes| element(bytes)).collect()
}
