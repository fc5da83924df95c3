//! `consort rm`: deletes models from the store.

use std::io::{Write, stdout};

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;

use crate::store::Store;

/// Delete models from this machine
#[derive(Args, Debug)]
pub struct RmArgs {
    /// Names as `consort list` prints them; owner/name without :Q4_K_M deletes the whole repository, an alias only
    /// itself
    #[arg(required = true)]
    models: Vec<String>,
}

impl RmArgs {
    pub fn run(self) -> Result<()> {
        let store = Store::from_environment()?;
        for model in self.models {
            if store.remove_alias(&model)? {
                writeln!(stdout(), "deleted the alias {model}")?;
                continue;
            }
            let bytes = store.remove(&model)?;
            writeln!(stdout(), "deleted {model} ({})", HumanBytes(bytes))?;
        }
        Ok(())
    }
}
