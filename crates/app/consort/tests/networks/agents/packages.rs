//! The agents, from npm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use testing::needs;

/// The folder of the programs, if npm has them. Installs them unless the same ones are there.
pub fn folder() -> Option<&'static Path> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    needs::npm(FOLDER.get_or_init(fetch).as_ref()).map(PathBuf::as_path)
}

fn fetch() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("agent-packages");
    let list = testing::repository("tests/clients/agents/package.json");
    let wanted = fs::read(list).unwrap();
    let (programs, fetched) = (folder.join("node_modules/.bin"), folder.join("fetched.json"));
    if fs::read(&fetched).is_ok_and(|there| there == wanted) {
        return Ok(programs);
    }
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("package.json"), &wanted).unwrap();
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--loglevel=error"]).current_dir(&folder);
    needs::ran("npm", npm.output())?;
    fs::write(fetched, wanted).unwrap();
    Ok(programs)
}
