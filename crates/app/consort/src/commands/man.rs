//! `consort man`: the manual pages, made from the same text as `--help`.

use std::fs;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_mangen::Man;

use super::Cli;
use crate::usage::UsageError;

/// Print the manual page of consort, or of one of its commands
///
/// consort man | man -l -   shows it; --out FOLDER writes the pages of all commands, for `man consort-run`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// Command whose page to print
    command: Option<String>,
    /// Write the pages of all commands into this folder
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    out: Option<PathBuf>,
}

impl ManArgs {
    pub fn run(self) -> Result<()> {
        let mut root = Cli::documented().disable_help_subcommand(true);
        // Gives every subcommand its full name: consort-run.
        root.build();
        if let Some(folder) = &self.out {
            return write_all(&root, folder);
        }
        let command = match &self.command {
            None => &root,
            Some(name) => root.find_subcommand(name).ok_or_else(|| {
                UsageError::new(format!("`consort {name}` is no command: `consort --help` lists them"))
            })?,
        };
        Ok(stdout().write_all(&page(command)?)?)
    }
}

fn write_all(root: &Command, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    write_pages(root, folder)
}

/// Writes the page of a command and those of its subcommands, to which it refers.
fn write_pages(command: &Command, folder: &Path) -> Result<()> {
    let path = folder.join(format!("{}.1", full_name(command)));
    fs::write(&path, page(command)?).with_context(|| format!("write {}", path.display()))?;
    let mut shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    shown.try_for_each(|subcommand| write_pages(subcommand, folder))
}

fn page(command: &Command) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    Man::new(command.clone()).title(full_name(command)).render(&mut page).context("write the manual page")?;
    Ok(page)
}

fn full_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}
