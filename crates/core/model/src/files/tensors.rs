//! The table of a model's tensors: the file and byte range of each name. Building it checks that names are unique and that
//! no two tensors of one file overlap.

use std::ops::Range;

use types::DType;

use super::error::{FormatError, shown};

/// The most dimensions of a tensor.
pub const RANK_MAX: usize = 8;
/// The most tensors of a model, in all its files.
pub const TENSORS_MAX: usize = 1 << 20;

/// The location of a tensor. `D` is the type of its number format.
#[derive(Clone)]
pub struct Tensor<D> {
    pub name: Box<str>,
    pub dtype: D,
    pub shape: Shape,
    /// Index of its file among the files of the model.
    pub file: u32,
    /// Its bytes in that file, in bounds.
    pub range: Range<usize>,
}

/// Outermost dimension first.
#[derive(Clone, Copy, Default)]
pub struct Shape {
    dims: [usize; RANK_MAX],
    rank: u8,
}

impl Shape {
    /// Appends an inner dimension; `None` if there are too many.
    pub fn push(&mut self, dim: usize) -> Option<()> {
        *self.dims.get_mut(usize::from(self.rank))? = dim;
        self.rank += 1;
        Some(())
    }

    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    pub fn reverse(&mut self) {
        self.dims[..usize::from(self.rank)].reverse();
    }

    /// The number of elements; `None` on overflow.
    pub fn elements(&self) -> Option<usize> {
        self.dims().iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))
    }
}

/// Bytes of a tensor; `None` if its rows are not whole blocks, or on overflow.
pub fn stored_bytes(dtype: DType, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
    let row = shape.last().copied().unwrap_or(1);
    dtype.row_bytes(row).and_then(|_| dtype.row_bytes(elements))
}

/// Sorted by name.
pub struct Table<D>(Vec<Tensor<D>>);

impl<D> Table<D> {
    pub fn new(mut tensors: Vec<Tensor<D>>) -> Result<Self, FormatError> {
        limit(tensors.len())?;
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        match tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            Some(pair) => Err(FormatError::Duplicate { what: "tensors", name: shown(&pair[0].name) }),
            None => Ok(Self(tensors)),
        }
    }

    pub fn get(&self, name: &str) -> Option<&Tensor<D>> {
        let at = self.0.binary_search_by(|tensor| (*tensor.name).cmp(name)).ok()?;
        Some(&self.0[at])
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Tensor<D>> {
        self.0.iter()
    }

    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.0.iter().map(|tensor| &*tensor.name)
    }
}

pub fn limit(tensors: usize) -> Result<(), FormatError> {
    match tensors > TENSORS_MAX {
        true => Err(FormatError::Limit { what: "tensors", found: tensors as u64, max: TENSORS_MAX as u64 }),
        false => Ok(()),
    }
}

/// Checks that the tensors of one file do not overlap. Sorts them by position.
pub fn check_disjoint<D>(tensors: &mut [Tensor<D>]) -> Result<(), FormatError> {
    tensors.sort_unstable_by_key(|tensor| (tensor.range.start, tensor.range.end));
    let mut last: Option<&Tensor<D>> = None;
    for tensor in tensors.iter().filter(|tensor| !tensor.range.is_empty()) {
        match last {
            Some(last) if tensor.range.start < last.range.end => {
                return Err(FormatError::Overlap { first: shown(&last.name), second: shown(&tensor.name) });
            }
            _ => last = Some(tensor),
        }
    }
    Ok(())
}
