//! `consort list`: the models in the store.

use std::io::{Write, stdout};

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use serde_json::json;

use crate::store::Store;

/// List the models on this machine
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Print one JSON object per line: name, bytes, complete, path, aliases
    #[arg(long)]
    json: bool,
}

impl ListArgs {
    pub fn run(self) -> Result<()> {
        let store = Store::from_environment()?;
        let (models, aliases) = (store.list()?, store.aliases()?);
        let aliases_of = |model: &str| -> Vec<&str> {
            aliases.iter().filter(|(_, target)| *target == model).map(|(alias, _)| alias.as_str()).collect()
        };
        let mut out = stdout().lock();
        if self.json {
            for model in models {
                let path = model.path.display().to_string();
                let row = json!({
                    "name": model.name,
                    "bytes": model.bytes,
                    "complete": model.complete,
                    "path": path,
                    "aliases": aliases_of(&model.name),
                });
                writeln!(out, "{row}")?;
            }
            return Ok(());
        }
        if models.is_empty() {
            eprintln!("no models yet: `consort search` lists models, `consort pull NAME` fetches one");
            return Ok(());
        }
        let width = models.iter().map(|model| model.name.len()).max().unwrap_or_default();
        writeln!(out, "{:width$}  {:>12}", "NAME", "SIZE")?;
        for model in models {
            let mut note = if model.complete { String::new() } else { "  incomplete: pull it again".to_owned() };
            for alias in aliases_of(&model.name) {
                note += &format!("  also {alias}");
            }
            writeln!(out, "{:width$}  {:>12}{note}", model.name, HumanBytes(model.bytes).to_string())?;
        }
        Ok(())
    }
}
