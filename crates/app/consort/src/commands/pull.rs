//! `consort pull`: downloads a model into the store.

use std::io::{Write, stdout};

use anyhow::Result;
use clap::Args;

use crate::store::Store;

/// Download or update a model
///
/// Models are kept in the Hugging Face cache (HF_HOME, HF_HUB_CACHE). HF_TOKEN gives access to private and gated
/// repositories, HF_ENDPOINT sets another hub. An interrupted download is resumed.
#[derive(Args, Debug)]
pub struct PullArgs {
    /// Hub repository (owner/name), with :Q4_K_M or :FILE.gguf to choose a GGUF [default: a small model]
    model: Option<String>,
}

impl PullArgs {
    pub fn run(self) -> Result<()> {
        let files = Store::from_environment()?.pull(self.model.as_deref())?;
        writeln!(stdout(), "{}\t{}", files.name, files.path.display())?;
        Ok(())
    }
}
