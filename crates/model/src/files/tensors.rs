//! The tensors of a model by name: where each lies in which file. Building the table checks what holds between tensors:
//! names are unique and no two tensors of one file share a byte.

use std::ops::Range;

use super::error::{FormatError, shown};

/// Dimensions of a tensor.
pub const RANK_MAX: usize = 8;
/// Tensors of a model, all its files together.
pub const TENSORS_MAX: usize = 1 << 20;

/// Where a tensor lies. `D` is how its number format is known.
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
    /// Appends an inner dimension, or says that there are too many.
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

    /// How many elements, unless they are too many to count.
    pub fn elements(&self) -> Option<usize> {
        self.dims().iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))
    }
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

/// Checks that the tensors of one file share no bytes. Leaves them in the order they lie in.
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
