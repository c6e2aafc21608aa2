//! `cargo xtask screenshots`: draws the output of `ucx-gaudi doctor` and `ucx-gaudi top` as SVGs in `docs/pictures`.
//!
//! The output has colours, as on a terminal, and is drawn by `anstyle-svg`. Paths of this checkout are shown as those
//! of an installation.

use std::time::Duration;

use anstyle_svg::Term;
use anyhow::{Context, Result, ensure};
use e2e::{Device, Ucx, Workbench};

use crate::dist;
use crate::repo::Repo;
use crate::setup;

const FOLDER: &str = "docs/pictures";
/// Columns of the terminal.
const COLUMNS: usize = 130;

/// Builds, and makes both pictures.
pub(crate) fn run(repo: &Repo) -> Result<()> {
    setup::fetch(repo, &[Ucx::V1_22])?;
    dist::build_again(repo)?;
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    std::fs::create_dir_all(repo.path(FOLDER))?;
    take(repo, &bench, &Device::cards(2), "doctor --soft=2")?;
    // Traffic, so that there is something to see.
    let device = Device::cards(2);
    let work = bench.client(Ucx::V1_22, &device, "soak --seconds 8").start();
    std::thread::sleep(Duration::from_secs(4));
    take(repo, &bench, &device, "top --once")?;
    work.finish(Duration::from_secs(20));
    Ok(())
}

fn take(repo: &Repo, bench: &Workbench, device: &Device, words: &str) -> Result<()> {
    let tool = bench.ucx_gaudi(Ucx::V1_22).device(device).words(words);
    let end = tool.env("CLICOLOR_FORCE", "1").env("COLUMNS", COLUMNS.to_string()).run();
    if end.stderr.contains("unexpected argument") {
        eprintln!("{words}: skipped: this version has no such option");
        return Ok(());
    }
    ensure!(end.success(), "{}", end.report());
    let name = words.split(' ').next().unwrap_or(words);
    let text = [
        (Ucx::V1_22.root(bench.layout()).join("libucx"), "/opt/ucx"),
        (repo.path("target/dist"), "/opt/ucx-gaudi"),
        (repo.path(""), "/src"),
    ]
    .into_iter()
    .fold(end.stdout, |text, (place, shown)| text.replace(&*place.to_string_lossy(), shown));
    let picture = Term::new().render_svg(&wrap(&format!("$ ucx-gaudi {words}\n{text}")));
    let path = repo.path(FOLDER).join(format!("{name}.svg"));
    std::fs::write(&path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("{FOLDER}/{name}.svg");
    Ok(())
}

/// Breaks lines as a terminal does. Escape sequences have no width.
fn wrap(text: &str) -> String {
    let mut wrapped = String::with_capacity(text.len());
    let (mut column, mut escape) = (0, false);
    for c in text.chars() {
        match c {
            '\n' => column = 0,
            '\u{1b}' => escape = true,
            _ if escape => escape = !c.is_ascii_alphabetic(),
            _ if column == COLUMNS => {
                wrapped.push('\n');
                column = 1;
            }
            _ => column += 1,
        }
        wrapped.push(c);
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_at_the_edge_and_colours_take_no_place() {
        let line = "x".repeat(COLUMNS);
        let coloured = format!("\u{1b}[32m{line}\u{1b}[0m\n{line}y\n");
        assert_eq!(wrap(&coloured), format!("\u{1b}[32m{line}\u{1b}[0m\n{line}\ny\n"));
    }
}
