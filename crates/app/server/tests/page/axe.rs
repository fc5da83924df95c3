//! axe-core, the accessibility checker that the field uses. Its licence is not ours, so it is not in the repository: npm fetches
//! it on the first run, and it stays in the build folder.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::json;
use testing::needs;

use crate::tab::Tab;

const VERSION: &str = "4.14.0";

/// Checks what is on show.
pub fn assert_accessible(tab: &Tab, view: &str) {
    let Some(source) = source() else { return };
    if tab.eval("typeof window.axe") != "object" {
        tab.eval(&format!("{source};0"));
    }
    tab.eval("Promise.all(document.getAnimations().filter((a) => a.effect.getTiming().iterations === 1).map((a) => a.finished.catch(() => {})))");
    let result = tab.eval(
        "axe.run().then(({ violations, passes }) => ({
            passes: passes.length,
            violations: violations.map(({ id, nodes }) => [id, nodes.map((n) => n.html.slice(0, 160))]),
        }))",
    );
    assert_eq!(result["violations"], json!([]), "{view}");
    assert!(result["passes"].as_u64().is_some_and(|passes| passes > 10), "{view}: axe looked at nothing");
}

/// Its script, if npm has it.
fn source() -> Option<&'static str> {
    static SOURCE: OnceLock<Result<String, String>> = OnceLock::new();
    needs::npm(SOURCE.get_or_init(fetch).as_ref()).map(String::as_str)
}

fn fetch() -> Result<String, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("axe-{VERSION}"));
    let script = folder.join("node_modules/axe-core/axe.min.js");
    if !script.is_file() {
        let mut npm = Command::new("npm");
        npm.args(["install", "--loglevel=error", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund"]);
        needs::ran("npm", npm.arg("--prefix").arg(&folder).arg(format!("axe-core@{VERSION}")).output())?;
    }
    Ok(fs::read_to_string(&script).unwrap())
}
