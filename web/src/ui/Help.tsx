// Keys of the page, in a dialog.

import { useEffect, useRef } from "preact/hooks";
import { t, type Key } from "../i18n";
import { Icon } from "./Icon";

const KEYS: [string[], Key][] = [
  [["/"], "help.search"],
  [["j", "k"], "help.rows"],
  [["Enter"], "help.open"],
  [["←", "→"], "help.arrows"],
  [["["," ]"], "help.siblings"],
  [["Esc"], "help.close"],
  [["?"], "help.help"],
];

export function Help({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="help-title">
      <div class="row between">
        <h2 id="help-title">{t("help.title")}</h2>
        <button class="plain" onClick={close} aria-label={t("action.close")}>
          <Icon name="close" />
        </button>
      </div>
      <dl class="keys">
        {KEYS.map(([keys, label]) => (
          <div>
            <dt>
              {keys.map((key) => (
                <kbd>{key.trim()}</kbd>
              ))}
            </dt>
            <dd>{t(label)}</dd>
          </div>
        ))}
      </dl>
      <p class="dim small">{t("help.charts")}</p>
    </dialog>
  );
}
