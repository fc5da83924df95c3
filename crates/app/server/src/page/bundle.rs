//! Joins the page's ES modules into one, so that a browser fetches all scripts with one request.
//!
//! A module becomes a function that returns its exports, and an import becomes a constant in the importing function. The
//! modules are our own and keep to a subset of the language; everything else is an error:
//!
//! - `import { a, b as c } from './x.js';` on one line, without cycles;
//! - `export` before a `function`, a `class` or a `const` with one name;
//! - only the entry module awaits at its top level.

use std::collections::BTreeMap;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    #[error("{from} imports {path}, which does not exist")]
    Missing { path: String, from: String },
    #[error("{path} imports itself through other modules")]
    Cycle { path: String },
    #[error("{path}: cannot join the line `{line}`")]
    Syntax { path: String, line: String },
}

/// Joins the modules that `entry` needs, by path. The result exports `modules`: the exports of each module but the entry,
/// by path.
pub fn join(sources: &BTreeMap<&str, &str>, entry: &str) -> Result<String, BundleError> {
    let mut bundle = Bundle { sources, joined: Vec::new(), open: Vec::new(), text: String::new() };
    bundle.add(entry, entry)?;
    let modules: String = bundle
        .joined
        .iter()
        .filter(|path| *path != entry)
        .map(|path| format!("  '{path}': {},\n", name(path)))
        .collect();
    Ok(format!("{}export const modules = {{\n{modules}}};\n", bundle.text))
}

struct Bundle<'a> {
    sources: &'a BTreeMap<&'a str, &'a str>,
    joined: Vec<String>,
    /// The modules whose imports are being joined, the entry first.
    open: Vec<String>,
    text: String,
}

impl Bundle<'_> {
    /// Appends a module after the modules that it imports.
    fn add(&mut self, path: &str, from: &str) -> Result<(), BundleError> {
        if self.joined.iter().any(|joined| joined == path) {
            return Ok(());
        }
        if self.open.iter().any(|open| open == path) {
            return Err(BundleError::Cycle { path: path.to_owned() });
        }
        let missing = || BundleError::Missing { path: path.to_owned(), from: from.to_owned() };
        let source = self.sources.get(path).ok_or_else(missing)?;
        let module = Module::parse(path, source)?;
        self.open.push(path.to_owned());
        for import in &module.imports {
            self.add(import, path)?;
        }
        self.open.pop();
        let Module { body, exports, .. } = module;
        if self.open.is_empty() {
            // A function could not await.
            self.text += &format!("// {path}\n{{\n{body}}}\n");
        } else {
            let (name, exports) = (name(path), exports.join(", "));
            self.text += &format!("// {path}\nconst {name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n");
        }
        self.joined.push(path.to_owned());
        Ok(())
    }
}

/// One module without `import` and `export`.
struct Module {
    imports: Vec<String>,
    exports: Vec<String>,
    body: String,
}

impl Module {
    fn parse(path: &str, source: &str) -> Result<Self, BundleError> {
        let mut module = Self { imports: Vec::new(), exports: Vec::new(), body: String::new() };
        for line in source.lines() {
            let syntax = || BundleError::Syntax { path: path.to_owned(), line: line.to_owned() };
            if line.starts_with("import ") {
                let (names, specifier) = import_of(line).ok_or_else(syntax)?;
                let import = resolve(path, specifier).ok_or_else(syntax)?;
                module.body += &format!("const {{{}}} = {};\n", names.replace(" as ", ": "), name(&import));
                module.imports.push(import);
            } else if let Some(declaration) = line.strip_prefix("export ") {
                module.exports.push(declared_name(declaration).ok_or_else(syntax)?.to_owned());
                module.body += &format!("{declaration}\n");
            } else {
                module.body += &format!("{line}\n");
            }
        }
        Ok(module)
    }
}

/// The names and the specifier of `import { names } from 'specifier';`.
fn import_of(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("import {")?.strip_suffix("';")?.split_once("} from '")
}

/// The name in `async function* name(…`, `class name …` or `const name = …`.
fn declared_name(declaration: &str) -> Option<&str> {
    let declaration = declaration.strip_prefix("async ").unwrap_or(declaration);
    let (kind, rest) = declaration.split_once(' ')?;
    if !matches!(kind, "function" | "function*" | "class" | "const") {
        return None;
    }
    let end = rest.find(|letter: char| !letter.is_alphanumeric() && letter != '_' && letter != '$')?;
    (end > 0).then(|| &rest[..end])
}

/// The path of a module that `from` imports: `./x.js` or `../x.js`.
fn resolve(from: &str, specifier: &str) -> Option<String> {
    let mut folders: Vec<&str> = from.split('/').collect();
    folders.pop();
    if !specifier.starts_with('.') {
        return None;
    }
    for part in specifier.split('/') {
        match part {
            "." => {}
            ".." => drop(folders.pop()?),
            name => folders.push(name),
        }
    }
    Some(folders.join("/"))
}

/// The constant that holds the exports of a module.
fn name(path: &str) -> String {
    format!("${}", path.trim_end_matches(".js").replace(|letter: char| !letter.is_ascii_alphanumeric(), "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join_modules(modules: &[(&'static str, &'static str)]) -> Result<String, BundleError> {
        join(&modules.iter().copied().collect(), "main.js")
    }

    #[test]
    fn a_module_comes_once_and_after_its_imports() {
        let joined = join_modules(&[
            ("main.js", "import { b } from './lib/b.js';\nimport { a as c } from './a.js';\nawait b(c);\n"),
            ("lib/b.js", "import { a } from '../a.js';\nexport async function b(x) {\n  return a + x;\n}\n"),
            ("a.js", "// One.\nexport const a = 1;\n"),
            ("unused.js", "export const unused = 1;\n"),
        ]);
        let wanted = "// a.js\nconst $a = (() => {\n// One.\nconst a = 1;\nreturn { a };\n})();\n\
            // lib/b.js\nconst $lib_b = (() => {\nconst { a } = $a;\nasync function b(x) {\n  return a + x;\n}\nreturn { b };\n})();\n\
            // main.js\n{\nconst { b } = $lib_b;\nconst { a: c } = $a;\nawait b(c);\n}\n\
            export const modules = {\n  'a.js': $a,\n  'lib/b.js': $lib_b,\n};\n";
        assert_eq!(joined.unwrap(), wanted);
    }

    #[test]
    fn what_cannot_be_joined_is_an_error() {
        let main = |source| join_modules(&[("main.js", source), ("a.js", "export const a = 1;\n")]).unwrap_err();
        for line in [
            "import a from './a.js';",
            "import './a.js';",
            "import { a } from 'a.js';",
            "import { a } from '../a.js';",
            "import {",
            "export default 1;",
            "export { a };",
            "export let a = 1;",
            "export const { a } = {};",
            "export * from './a.js';",
        ] {
            assert_eq!(main(line), BundleError::Syntax { path: "main.js".to_owned(), line: line.to_owned() });
        }
        let missing = BundleError::Missing { path: "b.js".to_owned(), from: "main.js".to_owned() };
        assert_eq!(main("import { b } from './b.js';"), missing);
        let cycle = join_modules(&[
            ("main.js", "import { a } from './a.js';"),
            ("a.js", "import { b } from './b.js';\nexport const a = 1;"),
            ("b.js", "import { a } from './a.js';\nexport const b = 1;"),
        ]);
        assert_eq!(cycle.unwrap_err(), BundleError::Cycle { path: "a.js".to_owned() });
    }
}
