//! `consort search`: models to fetch, of the catalogue and of the hub.

use std::collections::BTreeSet;
use std::io::{Write, stdout};

use anyhow::{Result, bail};
use clap::{Args, value_parser};
use indicatif::DecimalBytes;
use ranks::memory_available;
use serde_json::json;

use crate::store::catalogue::{Entry, catalogue};
use crate::store::{FoundModel, Store};
use crate::terminal;

/// The most models that a hub is asked for.
const RESULTS_MAX: u16 = 100;
/// The values of `general.architecture` in files that run.
const ARCHITECTURES: [&str; 5] = ["gemma3", "llama", "qwen2", "qwen3", "qwen3moe"];

/// Find models to run
///
/// Models of consort's catalogue come first: their short names are enough for every command. Then come those of the
/// hub that have GGUF files, the most downloaded first. Without a word, the whole catalogue is listed and the hub is
/// not asked.
#[derive(Args, Debug)]
pub struct SearchArgs {
    /// A word of the name, such as gemma or coder
    word: Option<String>,
    /// Most models of the hub
    #[arg(long, value_name = "COUNT", default_value_t = 15)]
    #[arg(value_parser = value_parser!(u16).range(1..=i64::from(RESULTS_MAX)))]
    limit: u16,
    /// Print one JSON object per line: name, source, and what is known of it
    #[arg(long)]
    json: bool,
}

impl SearchArgs {
    pub fn run(self) -> Result<()> {
        let store = Store::from_environment()?;
        let entries: Vec<_> = match &self.word {
            Some(word) => catalogue().search(word),
            None => catalogue().entries().iter().collect(),
        };
        let asked = self.word.as_ref().map(|word| store.search(word, self.limit.into()));
        let (found, refused) = match asked {
            Some(Ok(found)) => (found, None),
            Some(Err(error)) => (Vec::new(), Some(error)),
            None => (Vec::new(), None),
        };
        let here: BTreeSet<_> =
            store.list()?.into_iter().filter(|model| model.complete).map(|model| model.name).collect();
        // What the catalogue has is not told twice.
        let known: BTreeSet<_> = entries.iter().map(|entry| entry.page()).collect();
        let found: Vec<_> = found.into_iter().filter(|model| !known.contains(&model.repo.to_string())).collect();
        if self.json {
            print_json(&entries, &found, &here)?;
        } else {
            print_table(&entries, &found, &here)?;
        }
        match (refused, entries.is_empty() && found.is_empty()) {
            (Some(error), true) => Err(error),
            (Some(error), false) => {
                terminal::note(&format!("the hub was not searched: {error:#}"));
                Ok(())
            }
            (None, true) => bail!("nothing is called `{}`, here or on the hub", self.word.unwrap_or_default()),
            (None, false) => Ok(()),
        }
    }
}

fn fits(entry: &Entry) -> Option<bool> {
    memory_available().map(|free| entry.memory() <= free)
}

fn print_json(entries: &[&Entry], found: &[FoundModel], here: &BTreeSet<String>) -> Result<()> {
    let mut out = stdout().lock();
    for entry in entries {
        let row = json!({
            "name": entry.name,
            "source": "catalogue",
            "page": entry.page(),
            "download_bytes": entry.download,
            "memory_bytes": entry.memory(),
            "fits": fits(entry),
            "here": here.contains(&entry.name),
            "reason": entry.reason,
        });
        writeln!(out, "{row}")?;
    }
    for model in found {
        let row = json!({
            "name": model.repo.to_string(),
            "source": "hub",
            "downloads": model.downloads,
            "likes": model.likes,
            "architecture": model.architecture,
            "runs": runs(model),
        });
        writeln!(out, "{row}")?;
    }
    Ok(())
}

fn print_table(entries: &[&Entry], found: &[FoundModel], here: &BTreeSet<String>) -> Result<()> {
    let mut out = stdout().lock();
    let width = entries.iter().map(|entry| entry.name.len()).max().unwrap_or_default();
    if !entries.is_empty() {
        writeln!(out, "{:width$}  {:>9}  {:>9}", "CATALOGUE", "DOWNLOAD", "MEMORY")?;
    }
    for entry in entries {
        let note = match (here.contains(&entry.name), fits(entry)) {
            (true, _) => "here: ",
            (false, Some(false)) => "too large for this machine alone: ",
            (false, _) => "",
        };
        let (download, memory) = (DecimalBytes(entry.download).to_string(), DecimalBytes(entry.memory()).to_string());
        writeln!(out, "{:width$}  {download:>9}  {memory:>9}  {note}{}", entry.name, entry.reason)?;
    }
    if found.is_empty() {
        return Ok(());
    }
    if !entries.is_empty() {
        writeln!(out)?;
    }
    let width = found.iter().map(|model| model.repo.to_string().len()).max().unwrap_or_default();
    writeln!(out, "{:width$}  {:>11}", "HUB", "DOWNLOADS")?;
    for model in found {
        let note = match (runs(model), &model.architecture) {
            (Some(false), Some(architecture)) => format!("  does not run: {architecture}"),
            _ => String::new(),
        };
        writeln!(out, "{:width$}  {:>11}{note}", model.repo.to_string(), model.downloads)?;
    }
    Ok(())
}

/// Whether consort runs the model's architecture; `None` if the hub does not say which it is.
fn runs(model: &FoundModel) -> Option<bool> {
    model.architecture.as_deref().map(|name| ARCHITECTURES.contains(&name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use super::*;

    #[test]
    fn the_architectures_that_run_are_those_of_the_fixtures() {
        let folders = fs::read_dir(testing::repository("fixtures/oracle")).unwrap().flatten();
        let names = folders.map(|folder| folder.file_name().into_string().unwrap().replace('_', ""));
        // GGUFs of Mistral's models call themselves llama.
        let names: BTreeSet<_> = names.filter(|name| !name.starts_with("mistral")).collect();
        assert_eq!(names, ARCHITECTURES.into_iter().map(str::to_owned).collect());
    }
}
