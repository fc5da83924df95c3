//! Names that are near to a mistyped one.

/// The name with the fewest edits from `word`, if these are few for its length.
pub fn nearest(word: &str, names: impl IntoIterator<Item = impl AsRef<str>>) -> Option<String> {
    let word = word.to_lowercase();
    let edits_max = (word.chars().count() / 4).clamp(1, 4);
    let measured = names.into_iter().filter_map(|name| {
        let name = name.as_ref();
        let edits = edits(&word, &name.to_lowercase());
        (edits <= edits_max).then(|| (edits, name.to_owned()))
    });
    measured.min().map(|(_, name)| name)
}

/// The end of an error.
pub fn did_you_mean(name: Option<&str>) -> String {
    name.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}

/// How many characters have to be inserted, deleted, replaced or swapped with the next one.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    // Rows of the table for the prefixes of `a`: of two characters ago, of one ago, and the current one.
    let mut rows = [vec![0; b.len() + 1], (0..=b.len()).collect(), vec![0; b.len() + 1]];
    for (i, x) in a.iter().enumerate() {
        let [before, last, row] = &mut rows;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let kept = last[j] + usize::from(x != y);
            row[j + 1] = kept.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && (*x, a[i - 1]) == (b[j - 1], *y) {
                row[j + 1] = row[j + 1].min(before[j - 1] + 1);
            }
        }
        rows.rotate_left(1);
    }
    rows[1][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, count) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("lama3.2", "llama3.2", 1),
            ("qwen3-4b", "qwen3:4b", 1),
            ("misrtal", "mistral", 1),
            ("gemma", "qwen", 5),
        ] {
            assert_eq!(edits(a, b), count, "{a} {b}");
        }
    }

    #[test]
    fn only_what_is_near_is_suggested() {
        let names = ["qwen3", "qwen3:4b", "qwen3:14b", "mistral"];
        assert_eq!(nearest("Qwen3-4B", names).as_deref(), Some("qwen3:4b"));
        assert_eq!(nearest("mistrall", names).as_deref(), Some("mistral"));
        assert_eq!(nearest("falcon", names), None);
        assert_eq!(nearest("why is the sky blue?", names), None);
    }
}
