// Line drawings of 16 x 16, in the colour of the text around them.

const PATHS = {
  moon: "M13 9.5A5.5 5.5 0 0 1 6.5 3 5.5 5.5 0 1 0 13 9.5Z",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6ZM8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M3 13l1-1M12 4l1-1",
  system: "M2 3h12v8H2zM6 14h4M8 11v3",
  copy: "M5 5h8v8H5zM3 10V3h7",
  check: "M3 8.5 6.5 12 13 4.5",
  left: "M10 3 5 8l5 5",
  right: "M6 3l5 5-5 5",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9ZM10.5 10.5 14 14",
  close: "M4 4l8 8M12 4l-8 8",
  warning: "M8 2 14.5 13.5h-13ZM8 6.5v3.5M8 11.8v.2",
  info: "M8 1.8a6.2 6.2 0 1 0 0 12.4A6.2 6.2 0 0 0 8 1.8ZM8 7v4.2M8 4.6v.4",
  play: "M5 3l8 5-8 5z",
  stop: "M4 4h8v8H4z",
  pause: "M5 3v10M11 3v10",
  plus: "M8 3v10M3 8h10",
  damaged: "M9 1 7 5l3 2-3 3 2 5M2 2h12v12H2z",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true" focusable="false">
      <path
        d={PATHS[name]}
        fill="none"
        stroke="currentColor"
        stroke-width="1.5"
        stroke-linecap="round"
        stroke-linejoin="round"
      />
    </svg>
  );
}
