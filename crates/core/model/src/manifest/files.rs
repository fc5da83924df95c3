//! `ManifestTensors`: the tensors of a manifest that are needed, mapped from one file each.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use types::DType;

use super::{Manifest, TensorEntry};
use crate::files::TensorView;
use crate::files::map::FileBytes;
use crate::load::LoadError;
use crate::part::ModelPart;

pub(crate) struct ManifestTensors {
    manifest: Manifest,
    /// By the tensors' indices; `None`: not opened.
    files: Vec<Option<FileBytes>>,
    /// The addresses at which files are mapped, sorted, with the index of the tensor.
    addresses: Vec<(Range<usize>, usize)>,
}

impl ManifestTensors {
    /// Maps the files of the tensors that a part needs. `open` returns the path of each.
    pub fn open(
        manifest: &Manifest,
        part: ModelPart,
        mut open: impl FnMut(usize, &TensorEntry) -> io::Result<PathBuf>,
    ) -> Result<Self, LoadError> {
        let mut files: Vec<_> = manifest.tensors().iter().map(|_| None).collect();
        let mut addresses = Vec::new();
        for index in manifest.tensors_of(part)? {
            let entry = &manifest.tensors()[index];
            let map = open(index, entry).and_then(|path| FileBytes::map(&path));
            let bytes = map.map_err(|source| LoadError::TensorFile { tensor: entry.name.clone(), source })?;
            if bytes.len() as u64 != entry.bytes {
                let (found, expected) = (bytes.len() as u64, entry.bytes);
                return Err(LoadError::TensorLength { tensor: entry.name.clone(), found, expected });
            }
            let start = bytes.as_ptr().addr();
            addresses.push((start..start + bytes.len(), index));
            files[index] = Some(bytes);
        }
        addresses.sort_unstable_by_key(|(range, _)| range.start);
        Ok(Self { manifest: manifest.clone(), files, addresses })
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A view of a tensor; `None` if the manifest does not list it, an error if it was not opened.
    pub fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        let Some(index) = self.manifest.index_of(name) else { return Ok(None) };
        let TensorEntry { dtype, shape, .. } = &self.manifest.tensors()[index];
        match &self.files[index] {
            Some(bytes) => Ok(Some(TensorView { dtype: *dtype, shape, bytes })),
            None => Err(LoadError::NotOpened { tensor: name.to_owned() }),
        }
    }

    /// The format of a tensor, opened or not.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        Some(self.manifest.tensors()[self.manifest.index_of(name)?].dtype)
    }

    pub fn location(&self, name: &str) -> Option<(&Path, Range<usize>)> {
        let file = self.files[self.manifest.index_of(name)?].as_ref()?;
        Some((file.path()?, 0..file.len()))
    }

    /// Drops the pages of the files that hold these bytes.
    pub fn release_of<'a>(&self, views: impl Iterator<Item = &'a [u8]>) {
        views.filter_map(|view| self.file_of(view)).for_each(FileBytes::release);
    }

    /// The file that holds a view of a tensor.
    pub fn file_of(&self, view: &[u8]) -> Option<&FileBytes> {
        let address = view.as_ptr().addr();
        let at = self.addresses.partition_point(|(range, _)| range.start <= address);
        let holder = at.checked_sub(1).map(|at| &self.addresses[at]).filter(|(range, _)| range.contains(&address));
        holder.and_then(|&(_, index)| self.files[index].as_ref())
    }

    pub fn release(&self) {
        self.files.iter().flatten().for_each(FileBytes::release);
    }
}
