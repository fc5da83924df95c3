//! The agents, from npm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the programs. Installs them unless the same ones are there.
pub fn folder() -> &'static Path {
    static FOLDER: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("agent-packages");
        let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/clients/agents/package.json");
        let wanted = fs::read(list).unwrap();
        let (programs, fetched) = (folder.join("node_modules/.bin"), folder.join("fetched.json"));
        if fs::read(&fetched).is_ok_and(|there| there == wanted) {
            return programs;
        }
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("package.json"), &wanted).unwrap();
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--loglevel=error"]).current_dir(&folder);
        let output = npm.output().expect("npm is needed for the agents (Debian: apt-get install npm)");
        assert!(output.status.success(), "npm: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(fetched, wanted).unwrap();
        programs
    })
}
