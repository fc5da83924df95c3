//! `TcpExchange`: a mesh as the `Collective` of a backend. Activations pass through this process's memory on the way, in
//! pieces of whole rows, so that a mesh for any number of elements serves steps of any size. All ranks cut alike.

use std::cell::RefCell;

use kernels::{Backend, BackendError};
use model::{Collective, CollectiveError};
use types::Rank;

use super::mesh::{Mesh, MeshError};

/// The columns that an `all_gather` gets from a rank are its [`Rank::share`] of them.
#[derive(Debug)]
pub struct TcpExchange {
    inner: RefCell<Inner>,
}

#[derive(Debug)]
struct Inner {
    mesh: Mesh,
    /// The rows of the buffer in hand.
    values: Vec<f32>,
}

impl TcpExchange {
    pub fn new(mesh: Mesh) -> Self {
        Self { inner: RefCell::new(Inner { mesh, values: Vec::new() }) }
    }

    pub fn rank(&self) -> Rank {
        self.inner.borrow().mesh.rank()
    }

    /// Runs `exchange` on the first `rows` rows of `buffer`. A failure of the backend ends the mesh: the other ranks shall
    /// not wait for this one.
    fn run<B: Backend>(
        &self,
        backend: &B,
        rows: usize,
        buffer: &mut B::Buffer,
        exchange: impl Fn(&mut Mesh, &mut [f32]) -> Result<(), MeshError>,
    ) -> Result<(), CollectiveError> {
        let Inner { mesh, values } = &mut *self.inner.borrow_mut();
        let leave = |mesh: &Mesh, error: BackendError| {
            mesh.abort().lost(mesh.rank());
            CollectiveError::Backend(error)
        };
        let (cols, elements_max) = (backend.columns(buffer), mesh.elements_max());
        if cols > elements_max {
            return Err(MeshError::TooLarge { elements: cols, elements_max }.into());
        }
        // Without columns there is nothing to cut.
        let piece = (elements_max.checked_div(cols).unwrap_or(0) * cols).max(1);
        let values = room(values, rows.saturating_mul(cols)).map_err(|error| leave(mesh, error))?;
        backend.read(buffer, 0..rows, values).map_err(|error| leave(mesh, error))?;
        values.chunks_mut(piece).try_for_each(|piece| exchange(mesh, piece))?;
        backend.write(buffer, values).map_err(|error| leave(mesh, error))
    }
}

impl<B: Backend> Collective<B> for TcpExchange {
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.run(backend, rows, buffer, |mesh, values| mesh.all_reduce(values))
    }

    fn all_gather(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        let cols = backend.columns(buffer);
        self.run(backend, rows, buffer, |mesh, values| mesh.all_gather(cols, |rank| rank.share(cols), values))
    }

    fn broadcast(&self, backend: &B, root: Rank, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.run(backend, rows, buffer, |mesh, values| mesh.broadcast(root, values))
    }
}

/// The first `elements` of `values`, which grow as needed.
fn room(values: &mut Vec<f32>, elements: usize) -> Result<&mut [f32], BackendError> {
    if values.len() < elements {
        let bytes = elements.saturating_mul(size_of::<f32>());
        values
            .try_reserve_exact(elements - values.len())
            .map_err(|_| BackendError::OutOfMemory { what: "an exchange between hosts", bytes })?;
        values.resize(elements, 0.0);
    }
    Ok(&mut values[..elements])
}
